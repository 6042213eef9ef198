"""`python -m headway` is the `headway` command."""

import sys

from headway.cli.main import main

sys.exit(main())
