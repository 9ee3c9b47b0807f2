# The extension is called through engine/ only, which gives its names their types.
from typing import Any

def __getattr__(name: str) -> Any: ...
