"""What a run's configuration needs to know of the world around it. No torch: `--dry-run` uses this too."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
