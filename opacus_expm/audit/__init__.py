"""Does the mechanism keep its word? Audits that put a number found beside the number claimed.

| audit | sees | gives |
|---|---|---|
| ``audit_pair`` | the densities from which the engine draws on two data sets | the exact privacy loss between them |
| ``worst_pair``, ``audit_worst`` | the same, on data as bad as the clipping bounds allow | the worst of a search |
| ``audit_learned`` | what parts of learned rounds release, one after the other | the exact loss of their joint law |
| ``black_box`` | released models only, loader in and model out | a lower bound on ε, with confidence |
| ``black_box_dp_sgd`` | the same for Opacus DP-SGD | the same, for comparison |
| ``paper_practice`` | bounds read off the private data | a pair of data sets that breaks the claim |

**Privacy:** an audit's report is NOT private. It shows what the private densities reveal of a record, and is for data that
the auditor may look at. ``audit_pair`` and the black boxes, which take data, warn of it; the others make their own data.
"""

from opacus_expm.audit.adaptive import audit_learned
from opacus_expm.audit.attacks import black_box, black_box_dp_sgd, lower_bound
from opacus_expm.audit.canary import Canary, audit_black_box
from opacus_expm.audit.exact import audit_pair, observed_loss
from opacus_expm.audit.findings import Finding, Report
from opacus_expm.audit.pairs import Pair, Record, Setting
from opacus_expm.audit.practice import paper_practice
from opacus_expm.audit.worst import audit_exact, audit_worst, worst_pair

__all__ = [
    "Canary",
    "Finding",
    "Pair",
    "Record",
    "Report",
    "Setting",
    "audit_black_box",
    "audit_exact",
    "audit_learned",
    "audit_pair",
    "audit_worst",
    "black_box",
    "black_box_dp_sgd",
    "lower_bound",
    "observed_loss",
    "paper_practice",
    "worst_pair",
]
