//! Holds the lists that the checks use. Each exception has its reason beside it.

/// The cores: packages without sockets, files, clocks, threads and async.
pub const CORES: [&str; 8] = [
    "longhaul-protocol",
    "longhaul-codec",
    "longhaul-qemu-stream",
    "longhaul-engine",
    "longhaul-attempt",
    "longhaul-overlay",
    "longhaul-paths",
    "longhaul-realm",
];

/// The dependencies allowed for each package of the workspace (without those of its tests).
pub const DIRECTION: [(&str, &[&str]); 30] = [
    ("longhaul-protocol", &[]),
    ("longhaul-codec", &["longhaul-protocol"]),
    ("longhaul-qemu-stream", &["longhaul-protocol"]),
    ("longhaul-engine", &CORES),
    (
        "longhaul-attempt",
        &["longhaul-protocol", "longhaul-engine"],
    ),
    ("longhaul-overlay", &["longhaul-protocol"]),
    ("longhaul-paths", &["longhaul-protocol"]),
    ("longhaul-realm", &["longhaul-protocol"]),
    ("longhaul-hypervisor", &CORES),
    (
        "longhaul-libvirt",
        &["longhaul-protocol", "longhaul-hypervisor"],
    ),
    (
        "longhaul-proxmox",
        &["longhaul-protocol", "longhaul-hypervisor"],
    ),
    ("longhaul-storage", &CORES),
    ("longhaul-image", &["longhaul-storage"]),
    ("longhaul-parcel", &["longhaul-storage"]),
    ("longhaul-transport", &CORES),
    (
        "longhaul-network",
        &[
            "longhaul-protocol",
            "longhaul-overlay",
            "longhaul-paths",
            "longhaul-realm",
            "longhaul-transport",
        ],
    ),
    (
        "longhaul-rendezvous",
        &["longhaul-protocol", "longhaul-realm", "longhaul-transport"],
    ),
    ("longhaul-api", &["longhaul-protocol"]),
    (
        "longhaul-migration",
        &[
            "longhaul-protocol",
            "longhaul-codec",
            "longhaul-engine",
            "longhaul-attempt",
            "longhaul-hypervisor",
            "longhaul-libvirt",
            "longhaul-proxmox",
            "longhaul-storage",
            "longhaul-image",
            "longhaul-parcel",
            "longhaul-transport",
            "longhaul-overlay",
            "longhaul-network",
            "longhaul-api",
        ],
    ),
    (
        "longhaul-longhaul",
        &[
            "longhaul-protocol",
            "longhaul-engine",
            "longhaul-hypervisor",
            "longhaul-storage",
            "longhaul-image",
            "longhaul-parcel",
            "longhaul-transport",
            "longhaul-api",
            "longhaul-migration",
            "longhaul-network",
            "longhaul-realm",
            "longhaul-rendezvous",
        ],
    ),
    // The codec's baseline: used by the laboratory alone, never part of the product.
    ("longhaul-cloudnet", &[]),
    // The laboratory drives the product from outside.
    (
        "longhaul-lab",
        &["longhaul-protocol", "longhaul-api", "longhaul-history"],
    ),
    // Only its codec benches call the codec and its baseline, only exports of disks that nobody
    // uses the parcel.
    (
        "longhaul-lab-bench",
        &[
            "longhaul-protocol",
            "longhaul-api",
            "longhaul-codec",
            "longhaul-cloudnet",
            "longhaul-parcel",
            "longhaul-history",
            "longhaul-lab",
        ],
    ),
    (
        "longhaul-lab-crash",
        &[
            "longhaul-protocol",
            "longhaul-api",
            "longhaul-history",
            "longhaul-lab",
        ],
    ),
    ("longhaul-lab-guests", &["longhaul-api", "longhaul-lab"]),
    (
        "longhaul-lab-program",
        &[
            "longhaul-protocol",
            "longhaul-api",
            "longhaul-history",
            "longhaul-lab",
            "longhaul-lab-bench",
            "longhaul-lab-crash",
            "longhaul-lab-guests",
        ],
    ),
    ("longhaul-checks", &[]),
    // The model runs the functions of the handover, and nothing else of the product.
    ("longhaul-model", &["longhaul-protocol", "longhaul-engine"]),
    ("longhaul-arena", &[]),
    ("longhaul-history", &[]),
];

/// The modules of `crates/migration`, and which others each may import. The two ends of a migration
/// do not import each other; modules that both use import neither.
pub const MIGRATION_MODULES: [(&str, &[&str]); 21] = [
    // Tests of the two ends against each other.
    ("both_ends", &["carrier", "destination", "limits", "source"]),
    ("carrier", &[]),
    ("host", &[]),
    ("channel", &["host"]),
    ("files", &["host"]),
    ("verify", &["disks"]),
    ("context", &["host", "limits", "status"]),
    ("disks", &["context", "handover", "host", "status"]),
    ("handover", &["context", "host", "status"]),
    ("limits", &["context", "host"]),
    ("status", &["context", "host"]),
    ("left_behind", &["context", "disks", "host", "status"]),
    (
        "source",
        &[
            "carrier", "channel", "context", "disks", "files", "handover", "host", "limits",
            "status", "verify",
        ],
    ),
    (
        "destination",
        &[
            "carrier", "channel", "context", "disks", "files", "handover", "host", "limits",
            "replicas", "status", "terminal", "verify",
        ],
    ),
    (
        "terminal",
        &["channel", "context", "host", "limits", "status"],
    ),
    (
        "replicas",
        &[
            "channel",
            "context",
            "disks",
            "host",
            "left_behind",
            "limits",
            "status",
        ],
    ),
    (
        "replication",
        &[
            "channel", "context", "disks", "host", "limits", "source", "status",
        ],
    ),
    ("residue", &["context", "host"]),
    (
        "companions",
        &[
            "context",
            "destination",
            "disks",
            "handover",
            "host",
            "limits",
            "residue",
            "source",
            "status",
        ],
    ),
    (
        "recovery",
        &["context", "destination", "handover", "source"],
    ),
    (
        "lib",
        &[
            "companions",
            "context",
            "destination",
            "disks",
            "handover",
            "host",
            "limits",
            "replicas",
            "replication",
            "residue",
            "source",
            "status",
            "terminal",
        ],
    ),
];

/// Words that the sources of `crates/migration` do not use, and what they use instead. A migration
/// reaches a guest through its manager, so that other managers fit in.
pub const BEHIND_MANAGERS: [(&str, &str); 9] = [
    ("guest::find", "GuestManager::find"),
    ("RecordedGuest", "the handle hypervisor::Guest"),
    ("GuestFolder", "the handle hypervisor::Guest"),
    ("hypervisor::folder", "the handle hypervisor::Guest"),
    ("launch::", "GuestManager::launch_incoming"),
    ("Launcher", "GuestManager"),
    ("parts.launcher", "parts.guests"),
    ("Qmp::connect", "GuestManager::lease"),
    ("memory::resume", "GuestManager::abort_outgoing or commit"),
];

/// The only source of `crates/migration` that names the managers of a host: it makes them.
pub const MAKES_MANAGERS: &str = "crates/migration/src/host/state.rs";

/// Third-party packages allowed in a core, and why they do no I/O of their own.
pub const CORE_DEPENDENCIES: [(&str, &str); 20] = [
    ("arrayvec", "of blake3: arrays that fill up"),
    ("blake3", "hashing; only its functions on slices are used"),
    ("cfg-if", "a macro"),
    ("cobs", "of postcard: not used by us"),
    ("constant_time_eq", "of blake3: comparing"),
    ("cpufeatures", "of blake3: asks the processor, nothing else"),
    ("embedded-io", "of postcard: traits without implementations"),
    (
        "getrandom",
        "of ring: its random numbers are not used by us",
    ),
    ("libc", "of ring: types and constants"),
    ("lz4_flex", "compression of slices"),
    ("postcard", "serialisation to and from slices"),
    (
        "ring",
        "cryptography; only its functions on slices are used",
    ),
    ("serde", "serialisation"),
    ("serde_core", "serialisation"),
    ("thiserror", "a macro for errors"),
    ("untrusted", "of ring: reading slices"),
    ("zeroize", "erases secrets in memory"),
    ("zstd", "compression; only its functions on slices are used"),
    ("zstd-safe", "of zstd: its safe interface"),
    ("zstd-sys", "of zstd: the C library, built without threads"),
];

/// Licences whose code may be part of a program under Apache-2.0.
pub const LICENCES: [&str; 9] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// The only allowed registry.
pub const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Packages that may be built in several versions at once, and the reasons.
pub const DUPLICATES: [(&str, &str); 8] = [
    (
        "cpufeatures",
        "blake3 and the generators of random numbers moved at different times",
    ),
    ("crypto-common", "of digest"),
    (
        "digest",
        "of object_store: its checksums and its MD5 moved at different times",
    ),
    ("embedded-io", "postcard offers two versions of its traits"),
    (
        "getrandom",
        "ring, rustls' parts and proptest moved at different times",
    ),
    (
        "hashbrown",
        "rusqlite's cache of statements uses an earlier one than toml",
    ),
    ("syn", "macro packages are moving to version 3"),
    ("synstructure", "of macro packages that use either syn"),
];

/// The maximum number of lines in a source file.
pub const LINES_MAX: usize = 800;

/// Files that may be longer, and the reasons.
pub const LONG_FILES: [(&str, &str); 0] = [];

/// Most columns of a line in sources and documents.
pub const COLUMNS_MAX: usize = 100;

/// Documents with wider lines, and why.
pub const WIDE_DOCUMENTS: [(&str, &str); 2] = [
    ("docs/benchmarks/README.md", "written by `lab results`"),
    ("docs/benchmarks/notes.md", "a part of that page"),
];

/// Phrases that documents do not use, and what they say instead (docs/words.md).
pub const PHRASES: [(&str, &str); 11] = [
    ("whoever", "who it is"),
    ("what is left", "the rest, pending or missing blocks"),
    ("so many", "a number"),
    ("where nothing is said", "by default"),
    ("stands still", "is stopped"),
    ("anew", "again"),
    ("mend", "fix"),
    ("to and fro", "back and forth"),
    ("all the same", "nevertheless"),
    ("hand-over", "handover"),
    ("front end", "disk export"),
];
