#!/usr/bin/env python3
"""Makes the captures in this folder again: one stream of each QEMU and machine type.

    capture.py VERSION=QEMU ...     (such as 11.1=/usr/bin/qemu-system-x86_64; needs `zstd`)

The guest has 4 MiB of RAM and no BIOS: a firmware of 200 bytes (firmware.S) fills some pages and
goes on writing to others, so that a capture has several passes and compresses to some kilobytes.
The stream is what QEMU writes into its migration socket, from the first byte to the last; the
return path is answered by SHUT(0) at the end.
"""
import json, os, socket, struct, subprocess, sys, tempfile, threading, time

CODE = bytes.fromhex(
    "fa2e660f0116b8f00f20c00c010f22c066ea18f0ffff080066b810008ed88ec08b3d00ffffff8b0d04ffffffc1"
    "e70c89f885c9741c69c00d661900055ff36e3c89078987fc07000081c70010000049ebe08b0d0cffffff85c974"
    "418b3508ffffffc1e60c69c00d661900055ff36e3c89c3f7e189d8c1e20cff441608898416b80b00008b1510ff"
    "ffff83ea0173fb0f20c281f2000001000f22c2ebc8f4ebfd900000000000000000ffff0000009acf00ffff0000"
    "0092cf001700a0f0ffff000000"
)
HERE = os.path.dirname(os.path.abspath(__file__))


def firmware(first, count, hot_first, hot, delay):
    image = bytearray(65536)
    image[0xF000:0xF000 + len(CODE)] = CODE
    image[0xFF00:0xFF14] = struct.pack("<5I", first, count, hot_first, hot, delay)
    image[0xFFF0:0xFFF3] = b"\xe9\x0d\xf0"
    return bytes(image)


class Qmp:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        for _ in range(200):
            try:
                self.socket.connect(path)
                break
            except OSError:
                time.sleep(0.05)
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self("qmp_capabilities")

    def __call__(self, command, **arguments):
        text = json.dumps({"execute": command, "arguments": arguments}) + "\n"
        self.socket.sendall(text.encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer['error']}")


def capture(qemu, machine, folder):
    bios = os.path.join(folder, "firmware")
    with open(bios, "wb") as out:
        out.write(firmware(16, 100, 300, 200, 4000))
    qmp_path, stream_path = os.path.join(folder, "qmp"), os.path.join(folder, "stream")
    process = subprocess.Popen([
        qemu, "-machine", machine, "-accel", "tcg", "-m", "4", "-nodefaults", "-display", "none",
        "-bios", bios, "-device", "virtio-rng-pci", "-qmp", f"unix:{qmp_path},server=on,wait=off"])
    try:
        qmp = Qmp(qmp_path)
        time.sleep(1)
        on = ["return-path", "events"]
        qmp("migrate-set-capabilities",
            capabilities=[{"capability": name, "state": True} for name in on])
        qmp("migrate-set-parameters", **{"max-bandwidth": 2000000, "downtime-limit": 1})
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(stream_path)
        listener.listen()
        qmp("migrate", uri=f"unix:{stream_path}")
        connection, _ = listener.accept()
        stream = bytearray()

        def drain():
            while piece := connection.recv(1 << 20):
                stream.extend(piece)

        reader = threading.Thread(target=drain)
        reader.start()
        while len(stream) < 4_000_000:
            time.sleep(0.02)
        qmp("stop")
        qmp("migrate-set-parameters", **{"max-bandwidth": 0, "downtime-limit": 2000000})
        size = -1
        while size != len(stream) or b'{"' not in stream:
            size = len(stream)
            time.sleep(0.5)
        connection.sendall(struct.pack(">HHI", 1, 4, 0))
        while qmp("query-migrate")["status"] != "completed":
            time.sleep(0.02)
        qmp("quit")
        reader.join()
        return bytes(stream)
    finally:
        process.wait(10)


def main():
    for version, qemu in (word.split("=", 1) for word in sys.argv[1:]):
        for machine in ["q35", "pc"]:
            with tempfile.TemporaryDirectory() as folder:
                stream = capture(qemu, machine, folder)
            name = os.path.join(HERE, f"{version}-{machine}.stream.zst")
            subprocess.run(["zstd", "-q", "-19", "-f", "-o", name], input=stream, check=True)
            print(name, len(stream), os.path.getsize(name))


main()
