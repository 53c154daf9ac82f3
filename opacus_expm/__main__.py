"""``python -m opacus_expm``."""

import sys

from opacus_expm.cli import main

sys.exit(main())
