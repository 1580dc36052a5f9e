"""Reads a sealed parcel and writes its disks.

This reader was written from docs/parcel.md alone, and shares nothing with the Rust code. It checks
the rules of the page strictly: what the page does not allow is refused.

    python3 reader.py [--key HEX] [--out FOLDER] DEVICE...
"""

import argparse
import collections
import errno
import functools
import hashlib
import hmac
import json
import os
import re
import struct
import sys
import tempfile

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CELL = 1 << 20
BODY = 1_048_512
NAME = struct.Struct("<4sBBHQ8sII")
Name = collections.namedtuple("Name", "magic version kind device row prefix generation zero")
HEADER, DATA, PARITY = 1, 2, 3
RECORDS = 1_048_480
NO_RECORD = 0xFFFFFFFF
GUEST, CHUNK, VERSION = 1, 2, 3
CHUNK_BYTES = 262_144
COMMON = ("parcel", "name", "key", "created", "parity")
HEX16, HEX32 = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{64}")
PARCEL_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Refused(Exception):
    """The parcel breaks a rule of the page, or cannot be read."""


def need(condition, message):
    """Refuse the parcel unless the condition holds."""
    if not condition:
        raise Refused(message)


def field(document, key, kind, least=0, most=(1 << 64) - 1):
    """The value of a key of a JSON object: its type is checked, and the range of an integer."""
    need(type(document) is dict, "a JSON value is not an object")
    value = document.get(key)
    need(type(value) is kind, f"the key {key} is missing or of a wrong type")
    need(kind is not int or least <= value <= most, f"the value of {key} is out of range")
    return value


def hexadecimal(document, key, pattern):
    """The value of a key that is a string of lowercase hexadecimal digits."""
    value = field(document, key, str)
    need(pattern.fullmatch(value), f"the value of {key} is not a string of hexadecimal digits")
    return value


def parse_json(data):
    """The JSON document in some bytes."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(f"a JSON document is wrong: {error}") from error


def zeros(data):
    """Whether all bytes are zero."""
    return data.count(0) == len(data)


# GF(2^8) and parity


def multiply(a, b):
    """The product of two elements of GF(2^8) with the polynomial 0x11d."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def power(exponent):
    """2 to the power of a number."""
    return functools.reduce(multiply, [2] * exponent, 1)


def inverse(a):
    """The element whose product with `a` is 1."""
    return next(b for b in range(1, 256) if multiply(a, b) == 1)


@functools.lru_cache(maxsize=256)
def table(factor):
    """The products of all bytes with a factor."""
    return bytes(multiply(byte, factor) for byte in range(256))


def scale(body, factor):
    """A body whose bytes are all multiplied by a factor."""
    return body.translate(table(factor))


def add(a, b):
    """The sum (XOR) of two bodies."""
    total = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return total.to_bytes(len(a), "little")


def parities(data):
    """The first and the second parity body of data bodies; a missing one (None) counts as 0."""
    size = len(next((body for body in data if body is not None), bytes(BODY)))
    p = q = bytes(size)
    for body in reversed(data):
        q = scale(q, 2)
        if body is not None:
            p, q = add(p, body), add(q, body)
    return p, q


def recover(parity, data):
    """Fill in the missing bodies (None) of a list of data bodies, if the parity bodies suffice."""
    if not parity:
        return
    missing = [j for j, body in enumerate(data) if body is None]
    p, q = (parity + [None])[:2]
    available = 2 - [p, q].count(None)
    if len(missing) > available or available == 0:
        return
    if missing:
        p_rest, q_rest = parities(data)
    if len(missing) == 1:
        x = missing[0]
        if p is not None:
            data[x] = add(p, p_rest)
        else:
            data[x] = scale(add(q, q_rest), inverse(power(x)))
    elif len(missing) == 2:
        x, y = missing
        a, b = add(p, p_rest), add(q, q_rest)
        data[x] = scale(add(b, scale(a, power(y))), inverse(power(x) ^ power(y)))
        data[y] = add(a, data[x])
    for given, computed in zip((p, q), parities(data)):
        need(given is None or given == computed, "a valid parity cell does not fit its row")


# Devices and headers


class Device:
    """A file or block device."""

    def __init__(self, path):
        self.path = path
        self.file = os.open(path, os.O_RDONLY)
        self.cells = os.lseek(self.file, 0, os.SEEK_END) // CELL

    def cell(self, row):
        """The cell at a row, or None if its digest is wrong or it cannot be read."""
        try:
            cell = os.pread(self.file, CELL, row * CELL)
        except OSError:
            return None
        if len(cell) < CELL or hashlib.sha256(memoryview(cell)[:-32]).digest() != cell[-32:]:
            return None
        return cell

    def valid_cells(self, start, wanted):
        """The names and contents of the valid cells, from a row on, whose names are wanted."""
        for row in range(start, self.cells):
            try:
                name = Name._make(NAME.unpack(os.pread(self.file, 32, row * CELL + BODY)))
            except (OSError, struct.error):
                continue
            in_place = (name.magic, name.version, name.row, name.zero) == (b"LHPC", 1, row, 0)
            if in_place and wanted(name) and (cell := self.cell(row)) is not None:
                yield name, cell


def capacities(document):
    """The capacities of the devices in a header or in an entry of `earlier`."""
    devices = field(document, "devices", list)
    need(1 <= len(devices) <= 255, "the number of devices is out of range")
    need(all(type(c) is int and 0 <= c <= 1 << 40 for c in devices), "a capacity is out of range")
    return devices


def check_header(cell, name):
    """The document of a header cell, after a check of all rules that concern it alone."""
    length = struct.unpack_from("<I", cell)[0]
    need(length <= 524_288, "a header document is too long")
    need(zeros(cell[36 + length:BODY]), "a header document is not followed by zeros")
    header = parse_json(cell[4:4 + length])
    header["proof"] = (bytes(cell[4:4 + length]), bytes(cell[4 + length:36 + length]))
    parcel = hexadecimal(header, "parcel", HEX16)
    need(bytes.fromhex(parcel)[:8] == name.prefix, "a header's parcel is not that of its cell")
    need(PARCEL_NAME.fullmatch(field(header, "name", str)), "the parcel's name is wrong")
    field(header, "to", str)
    field(header, "created", int)
    parity = field(header, "parity", int, 0, 2)
    hexadecimal(header, "key", HEX16)
    sealed = field(header, "sealed", bool)
    need(field(header, "row", int) == name.row, "a header's row is not that of its cell")
    need(field(header, "device", int) == name.device, "a header's device is not that of its cell")
    need(field(header, "generation", int) == name.generation, "a header's generation is wrong")
    need(name.device < len(capacities(header)), "a header's device is out of range")
    need(header["devices"][name.device] > name.row, "a header is beyond its device's capacity")
    earlier = field(header, "earlier", list)
    need(len(earlier) < 100, "there are too many generations")
    steps = earlier + [dict(header, first=name.row, end=name.row + 1)]
    for step in steps:
        field(step, "generation", int, 0, (1 << 32) - 1)
        hexadecimal(step, "nonce", HEX16)
        need(len(capacities(step)) == len(header["devices"]), "the number of devices changes")
        first, end = field(step, "first", int), field(step, "end", int)
        need(first <= end, "a generation ends before it begins")
        room = sorted(step["devices"], reverse=True)[parity:parity + 1]
        need(room and end <= room[0], "a generation ends after the parcel's room")
    for before, after in zip(steps, steps[1:]):
        need(before["generation"] < after["generation"], "generations are not in order")
        need(before["first"] < after["first"] >= before["end"], "generations overlap")
        fits = all(a >= b for a, b in zip(before["devices"], after["devices"]))
        need(fits, "a capacity becomes larger")
    if not sealed:
        header["earlier"] = None  # only those of the sealed header are used
    return header


class Parcel:
    """A sealed parcel: its devices by number, its last header and its generations."""

    def __init__(self, paths):
        self.reset()
        self.devices = {}
        self.prefix = None
        for path in paths:
            device = Device(path)
            name, _ = next(device.valid_cells(0, lambda name: True), (None, None))
            if name is None:
                print(f"reader: {path} has no valid cell and is ignored", file=sys.stderr)
                continue
            self.prefix = self.prefix or name.prefix
            need(name.prefix == self.prefix, f"{path} belongs to another parcel")
            need(name.device not in self.devices, f"{path} is a second device {name.device}")
            self.devices[name.device] = device
        self.find_sealed()
        self.id = bytes.fromhex(self.header["parcel"])
        self.parity = self.header["parity"]
        last = dict(self.header, first=self.header["row"], end=self.header["row"] + 1)
        self.generations = self.header["earlier"] + [last]
        self.missing = [d for d in range(len(last["devices"])) if d not in self.devices]

    def reset(self):
        """Begin to count cells again."""
        self.damaged = self.recovered = self.lost = 0

    def find_sealed(self):
        """Read all headers, find the last one, and check those rules that concern several."""
        headers = []
        for number, device in self.devices.items():
            def own(name, number=number):
                return (name.prefix, name.device) == (self.prefix, number)
            cells = device.valid_cells(0, lambda name: own(name) and name.kind == HEADER)
            headers += [check_header(cell, name) for name, cell in cells]
        last = max((h for h in headers if h["sealed"]), key=lambda h: h["row"], default=None)
        need(last is not None, "no sealed header was found")
        firsts = {e["first"]: e for e in last["earlier"] if e["first"] < e["end"]}
        for header in headers:
            same = all(header[key] == last[key] for key in COMMON)
            need(same and len(header["devices"]) == len(last["devices"]), "headers disagree")
            entry = firsts.get(header["row"])
            if header["row"] == last["row"]:
                keys = ("to", "devices", "generation", "nonce", "earlier", "sealed")
                need(all(header[key] == last[key] for key in keys), "the last headers disagree")
            elif entry:
                same = all(header[key] == entry[key] for key in ("generation", "nonce", "devices"))
                need(same and not header["sealed"], "an earlier header disagrees with the last")
        for number, device in self.devices.items():
            need(number < len(last["devices"]), "a device's number is out of range")
            later = device.valid_cells(last["row"] + 1, lambda name: name.prefix == self.prefix)
            need(next(later, None) is None, "a cell follows the sealed header")
        self.header = last

    def name(self, kind, device, row, generation):
        """The name of a cell."""
        number = generation["generation"]
        return NAME.pack(b"LHPC", 1, kind, device, row, self.prefix, number, 0)

    def body(self, kind, device, row, generation):
        """The body of a cell, or None if it is missing."""
        if device not in self.devices:
            return None
        cell = self.devices[device].cell(row)
        if cell is None or cell[BODY:-32] != self.name(kind, device, row, generation):
            self.damaged += 1
            return None
        return cell[:BODY]

    def data_cells(self, generation):
        """Row, device and body (None if lost) of each data cell of a generation, in order."""
        for row in range(generation["first"], generation["end"]):
            members = [d for d, cells in enumerate(generation["devices"]) if cells > row]
            if row == generation["first"]:
                for device in members:
                    self.body(HEADER, device, row, generation)
                continue
            turn = row % len(members)
            members = members[turn:] + members[:turn]
            kinds = [PARITY] * self.parity + [DATA] * (len(members) - self.parity)
            bodies = [self.body(k, d, row, generation) for k, d in zip(kinds, members)]
            parity, data = bodies[:self.parity], bodies[self.parity:]
            before = data.count(None)
            recover(parity, data)
            self.lost += data.count(None)
            self.recovered += before - data.count(None)
            for device, body in zip(members[self.parity:], data):
                yield row, device, body


# Encryption and the log


def hkdf(key, salt, info):
    """32 bytes of HKDF with SHA-256 (RFC 5869)."""
    extracted = hmac.digest(salt or bytes(32), key, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def plaintexts(parcel, key, generation):
    """The plaintext (None if lost) of each data cell of a generation, in order."""
    ciphers = {}
    for row, device, body in parcel.data_cells(generation):
        if body is None:
            yield None
            continue
        if device not in ciphers:
            info = b"longhaul parcel v1 cells" + bytes.fromhex(generation["nonce"])
            ciphers[device] = AESGCM(hkdf(key, parcel.id, info + struct.pack("<H", device)))
        nonce = struct.pack("<QI", row, 0)
        try:
            name = parcel.name(DATA, device, row, generation)
            yield ciphers[device].decrypt(nonce, body, name)
        except InvalidTag:
            parcel.lost += 1
            yield None


def generation_records(cells):
    """The kind and the rest of each record in the plaintexts of a generation."""
    kind, rest, length, lost = 0, bytearray(), 0, False  # kind 0: no record continues
    for number, plain in enumerate(cells):
        if plain is None:
            kind, lost = 0, True
            continue
        counted, start, zero = struct.unpack_from("<QII", plain)
        need(counted == number and zero == 0, "the beginning of a data cell is wrong")
        need(start == NO_RECORD or start <= RECORDS - 8, "an offset of a record is out of range")
        content, at = plain[16:], 0
        if lost and start == NO_RECORD:
            continue
        if lost:
            at, lost = start, False
        elif kind:
            at = min(length - len(rest), RECORDS)
            rest += content[:at]
            if len(rest) == length:
                yield kind, bytes(rest)
                kind = 0
        begins = not kind and at <= RECORDS - 8 and content[at]
        need(start == (at if begins else NO_RECORD), "the offset of the first record is wrong")
        while not kind and at <= RECORDS - 8 and content[at]:
            kind, zero, length = struct.unpack_from("<B3sI", content, at)
            need(kind in (GUEST, CHUNK, VERSION) and zeros(zero), "a record is of no known kind")
            need(length <= 1 << 20, "a record is too long")
            rest = bytearray(content[at + 8:at + 8 + length])
            at += 8 + len(rest)
            if len(rest) == length:
                yield kind, bytes(rest)
                kind = 0
        need(kind or zeros(content[at:]), "the rest of a data cell is not zeros")


def records(parcel, key):
    """The kind and the rest of each record of the log."""
    parcel.reset()
    for generation in parcel.generations:
        yield from generation_records(plaintexts(parcel, key, generation))


def check_guest(rest):
    """The number and the document of a guest record. Its disks become a dictionary by number."""
    guest = parse_json(rest)
    number = field(guest, "guest", int, 0, (1 << 32) - 1)
    disks = field(guest, "disks", list)
    need(len(disks) <= 256, "a guest has too many disks")
    for item in [guest] + disks:
        name = field(item, "name", str)
        need(name and "/" not in name and "\0" not in name, f"the name {name!r} is unsafe")
    for disk in disks:
        field(disk, "bytes", int, 0, 1 << 50)
    guest["disks"] = {field(disk, "disk", int, 0, (1 << 32) - 1): disk for disk in disks}
    need(len(guest["disks"]) == len(disks), "two disks of a guest have one number")
    return number, guest


def check_version(rest):
    """The guest, the number and the digests by disk of a version record."""
    version = parse_json(rest)
    field(version, "time", int)
    field(version, "consistent", bool)
    disks = field(version, "disks", list)
    digests = {field(disk, "disk", int): hexadecimal(disk, "digest", HEX32) for disk in disks}
    need(len(digests) == len(disks), "a version names a disk twice")
    return field(version, "guest", int), field(version, "version", int), digests


Final = collections.namedtuple("Final", "position guest version digests")


def find_versions(parcel, key):
    """The first pass: for each guest, its last version and the record's position in the log."""
    guests, finals = {}, {}
    for position, (kind, rest) in enumerate(records(parcel, key)):
        if kind == GUEST:
            number, guest = check_guest(rest)
            guests[number] = guest
        elif kind == CHUNK:
            need(len(rest) >= 20, "a chunk record is too short")
            known = struct.unpack_from("<I", rest)[0] in guests
            need(known or parcel.lost, "a chunk comes before its guest")
        else:
            number, version, digests = check_version(rest)
            if number not in guests and parcel.lost:
                continue
            need(number in guests, "a version comes before its guest")
            complete = digests.keys() == guests[number]["disks"].keys()
            need(complete or parcel.lost, "a version has not the disks of its guest")
            grows = number not in finals or finals[number].version < version
            need(grows, "a guest's versions do not grow")
            finals[number] = Final(position, guests[number], version, digests)
    return finals


# Disks


def next_data(file, offset):
    """Where in a sparse file the first data at or after an offset is."""
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return 1 << 63


def chunk_content(rest, size):
    """The content of a chunk record, which must have a given size."""
    how, zero, content = rest[16], rest[17:20], rest[20:]
    need(how <= 2 and zeros(zero), "a chunk's encoding is unknown")
    if how == 0:
        need(not content, "a chunk of zeros has content")
        return bytes(size)
    if how == 2:
        try:
            need(zstandard.frame_content_size(content) <= size, "a chunk's frame is too large")
            decompressor = zstandard.ZstdDecompressor()
            content = decompressor.decompress(content, size + 1, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Refused(f"a chunk cannot be decompressed: {error}") from error
    need(len(content) == size, "a chunk has a wrong size")
    return content


def apply_chunk(rest, disks, paths):
    """Write the content of a chunk record to the file of its disk, if it has one."""
    guest, number, chunk = struct.unpack_from("<IIQ", rest)
    need(number in disks, "a chunk belongs to no disk")
    size = min(CHUNK_BYTES, disks[number]["bytes"] - chunk * CHUNK_BYTES)
    need(size > 0, "a chunk is beyond the end of its disk")
    content = chunk_content(rest, size)
    if (guest, number) not in paths:
        return
    file = os.open(paths[guest, number], os.O_RDWR)
    try:
        offset = chunk * CHUNK_BYTES
        if not zeros(content) or next_data(file, offset) < offset + size:
            need(os.pwrite(file, content, offset) == size, "a file could not be written")
    finally:
        os.close(file)


def write_disks(parcel, key, finals, folder):
    """The second pass: write the disks of each guest's last version. Returns the files' paths."""
    paths = {}
    for number, final in finals.items():
        for disk, item in final.guest["disks"].items():
            path = os.path.join(folder, f"{final.guest['name']}-{item['name']}")
            need(path not in paths.values(), f"two disks would be written to {path}")
            paths[number, disk] = path
            open(path, "wb").close()
    guests = {}
    for position, (kind, rest) in enumerate(records(parcel, key)):
        if kind == GUEST:
            number, guest = check_guest(rest)
            guests[number] = guest["disks"]
        elif kind == CHUNK:
            number = struct.unpack_from("<I", rest)[0]
        if kind == VERSION or number not in finals or position > finals[number].position:
            continue
        if kind == GUEST:
            for disk, item in guest["disks"].items():
                if (number, disk) in paths:
                    os.truncate(paths[number, disk], item["bytes"])
            continue
        try:
            apply_chunk(rest, guests.get(number, {}), paths)
        except Refused:
            if not parcel.lost:  # else its guest's record may be lost
                raise
    return paths


@functools.lru_cache(maxsize=16)
def zeros_digest(size):
    """The digest of a chunk of zeros."""
    return hashlib.sha256(bytes(size)).digest()


def disk_digest(path, size):
    """The digest of a disk in a sparse file: SHA-256 of the digests of its chunks."""
    total, data = hashlib.sha256(), -1
    with open(path, "rb", buffering=0) as file:
        for offset in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - offset)
            if data < offset:
                data = next_data(file.fileno(), offset)
            if data >= offset + length:
                total.update(zeros_digest(length))
            else:
                content = os.pread(file.fileno(), length, offset)
                total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


def read_guests(parcel, key, folder):
    """Write the disks of all guests to a folder. Returns the guests for the report."""
    fingerprint = hkdf(key, b"", b"longhaul parcel v1 fingerprint")[:16]
    need(fingerprint.hex() == parcel.header["key"], "the key is not that of the parcel")
    document, tag = parcel.header["proof"]
    header_key = hkdf(key, parcel.id, b"longhaul parcel v1 headers")
    need(hmac.digest(header_key, document, "sha256") == tag, "the last header is not authentic")
    finals = find_versions(parcel, key)
    paths = write_disks(parcel, key, finals, folder)
    guests = []
    for number, final in sorted(finals.items()):
        disks = []
        for disk, item in final.guest["disks"].items():
            digest = disk_digest(paths[number, disk], item["bytes"])
            matches = digest == final.digests.get(disk)
            disks.append({"name": item["name"], "bytes": item["bytes"], "digest": digest,
                          "matches": matches})
        guests.append({"name": final.guest["name"], "version": final.version, "disks": disks})
    return guests


def run(options):
    """Read a parcel and print the report. Returns what is wrong, or None."""
    parcel = Parcel(options.devices)
    report = {"parcel": parcel.header["parcel"], "name": parcel.header["name"],
              "devices_missing": parcel.missing}
    guests = []
    if options.key is None:
        for generation in parcel.generations:
            for _ in parcel.data_cells(generation):
                pass
    else:
        with tempfile.TemporaryDirectory() as temporary:
            if options.out:
                os.makedirs(options.out, exist_ok=True)
            guests = read_guests(parcel, options.key, options.out or temporary)
    report["cells_damaged"] = parcel.damaged
    report["cells_recovered"] = parcel.recovered
    report["cells_lost"] = parcel.lost
    if options.key is not None:
        report["guests"] = guests
    print(json.dumps(report))
    if parcel.lost:
        return f"data cells that are lost: {parcel.lost}"
    wrong = [f"{guest['name']}-{disk['name']}" for guest in guests for disk in guest["disks"]
             if not disk["matches"]]
    return f"the digests of some disks do not match: {', '.join(wrong)}" if wrong else None


def main():
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(description="Reads a sealed parcel.")
    parser.add_argument("--key", metavar="HEX", help="the data key: 64 hexadecimal digits")
    parser.add_argument("--out", metavar="FOLDER", help="where the disks are written to")
    parser.add_argument("devices", metavar="DEVICE", nargs="+")
    options = parser.parse_args()
    if options.key is not None:
        if not HEX32.fullmatch(options.key):
            parser.error("the key must have 64 hexadecimal digits")
        options.key = bytes.fromhex(options.key)
    elif options.out:
        parser.error("--out needs --key")
    try:
        problem = run(options)
    except (Refused, OSError, UnicodeError) as error:
        problem = error
    if problem:
        print(f"reader: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
