"""Experiments as data, model and pretraining: the source paper's three, its clinical one with open data, and others."""

from opacus_expm.experiments import datasets
from opacus_expm.experiments.clinical import icu, icu_from_csv
from opacus_expm.experiments.digits import cnn, mnist, mnist_far
from opacus_expm.experiments.messages import sms_head, sms_lora
from opacus_expm.experiments.pictures import cifar10_head
from opacus_expm.experiments.synthetic import sine
from opacus_expm.experiments.task import Task, accuracy, fit, loss

__all__ = [
    "Task",
    "accuracy",
    "cifar10_head",
    "cnn",
    "datasets",
    "fit",
    "icu",
    "icu_from_csv",
    "loss",
    "mnist",
    "mnist_far",
    "sine",
    "sms_head",
    "sms_lora",
]
