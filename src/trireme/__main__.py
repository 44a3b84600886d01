"""`python -m trireme`: the same as the command `trireme`."""

import sys

from trireme.commands.cli import main

sys.exit(main())
