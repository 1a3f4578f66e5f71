"""For every test: what was proven of a model is found anew, never recalled from an earlier run."""

import os

os.environ["LOCANT_CACHE"] = ""
