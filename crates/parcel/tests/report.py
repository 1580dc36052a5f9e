"""Checks the proof of the report of an import, from docs/parcel.md alone.

    python3 report.py KEY REPORT
"""

import hashlib
import hmac
import json
import sys


def derive(key, salt, info):
    """32 bytes of HKDF with SHA-256."""
    extracted = hmac.digest(salt, key, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def main():
    """Say whether the report was made with the key."""
    key, path = bytes.fromhex(sys.argv[1]), sys.argv[2]
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    proof = bytes.fromhex(document.pop("proof"))
    form = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False}
    signed = json.dumps(document, **form).encode()
    derived = derive(key, bytes.fromhex(document["parcel"]), b"longhaul parcel v1 reports")
    expected = hmac.digest(derived, signed, hashlib.sha256)
    print("proved" if hmac.compare_digest(expected, proof) else "refused")


main()
