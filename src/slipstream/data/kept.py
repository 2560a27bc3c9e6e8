"""What takes long to make is kept in files; they are found again by what it was made from."""

import hashlib
import json


def key_of(*content: object) -> str:
    """24 letters and digits, the same for the same content (anything that JSON has)."""
    return hashlib.sha256(json.dumps(list(content)).encode()).hexdigest()[:24]
