import sys
from pathlib import Path

# synthetic_runs is shared by the tests of this room only.
sys.path.insert(0, str(Path(__file__).parent))
