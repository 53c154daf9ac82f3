"""Seven tasks, three budgets: this engine with nothing tuned beside Opacus DP-SGD in three ways.

    python -m benchmarks.suite [sine icu ...] [--seeds 5] [--epsilons 0.1 1 10] [--methods ours free ...] [--out DIRECTORY]
    python -m benchmarks.suite --report [--out DIRECTORY]

* ``zero-shot``: the model as it comes.
* ``non-private``: fine-tuned with Adam, without privacy.
* ``ours``: ``ExpMQuadEngine().make_private_expm(model, loader, epsilon, delta=1e-5, criterion=...)`` and nothing else. There
  is no public data, nothing is chosen for the task, and all costs are charged.
* ``pure``: the same call with δ = 0, a pure guarantee.
* ``free``, ``charged``, ``untuned``: DP-SGD tuned for free, with its tuning charged, and as in Opacus's example; see
  ``benchmarks.suite.rivals``.
* ``cited``, only where it is asked for: DP-SGD as ``benchmarks.accuracy`` has it, where ``free`` would take hours.
* ``metric``, only where it is asked for: DP-SGD tuned for free in this engine's metric; see ``benchmarks.suite.metric``.
* ``plain`` and ``public``, only where they are asked for: ``ours`` without a metric, and with one from public records.

Every finished run is a line of ``log.jsonl`` in the directory, and is not made again. What was asked for goes to
``TASK.json`` there, and from these files ``--report`` makes ``table.md`` and ``suite.png``; a run makes them at its end.
"""
