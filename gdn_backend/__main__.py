from __future__ import annotations

import sys

from gdn_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
