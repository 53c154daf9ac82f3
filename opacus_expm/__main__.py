"""``python -m opacus_expm``."""

import sys

from opacus_expm_command import main

sys.exit(main())
