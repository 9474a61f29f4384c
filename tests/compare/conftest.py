import sys
from pathlib import Path

# What this file and stub_tlm.py hold is shared by the tests of this room only.
sys.path.insert(0, str(Path(__file__).parent))
