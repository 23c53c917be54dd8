"""How long a test waits for what takes no time: a longer wait is a deadlock."""

import os

PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "10"))
