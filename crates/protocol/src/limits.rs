//! Limits on a peer's messages. Each is also stated in `docs/wire.md`.

/// Largest control message, in bytes (the device state of a guest travels in pieces).
pub const CONTROL_MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Largest frame of blocks, in bytes as sent.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Most blocks that one frame may describe.
pub const FRAME_BLOCKS_MAX: usize = 256;
/// Most bytes of frames that a destination buffers because they depend on frames that have not
/// arrived yet.
pub const FRAMES_EARLY_BYTES_MAX: usize = 32 << 20;
/// Most bytes of frames of memory that follows that a destination holds until it loads the guest.
pub const FRAMES_HELD_BYTES_MAX: usize = 8 << 20;
/// Most regions of one migration.
pub const REGIONS_MAX: usize = 64;
/// Most blocks in one region: 16 TiB of 4 KiB blocks.
pub const REGION_BLOCKS_MAX: u64 = 1 << 32;
/// Longest name of a guest, region, network, disk or channel, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Largest device state (everything that QEMU writes after its last RAM section), in bytes.
pub const DEVICE_STATE_BYTES_MAX: usize = 64 << 20;
/// Largest stream prelude (header up to the list of RAM blocks), in bytes.
pub const PRELUDE_BYTES_MAX: usize = 64 << 10;
/// The maximum length of what the programs that manage a guest tell each other at once, in bytes.
pub const COOKIE_BYTES_MAX: usize = 1 << 20;
/// Most devices in the description of a machine.
pub const DEVICES_MAX: usize = 4096;
/// Most CPU properties in the description of a machine.
pub const CPU_PROPERTIES_MAX: usize = 4096;
/// Most frames that one acknowledgement names.
pub const ACKNOWLEDGED_MAX: usize = 4096;
/// Most entries in one part of the list of a disk's missing blocks.
pub const REMAINING_MAX: usize = 1 << 16;
/// Most stripes of base images that one offer names as hot, over all of its disks.
pub const HOT_STRIPES_MAX: usize = 1 << 16;
/// Most files in one question or offer.
pub const FILES_MAX: usize = 128;
/// Longest path of a file at its host, in bytes.
pub const PATH_BYTES_MAX: usize = 4096;
/// Most ranges of blocks in one message about wanted or superseded blocks.
pub const RANGES_MAX: usize = 4096;
/// The maximum number of blocks in a question about known content.
pub const SAMPLES_MAX: usize = 1024;
/// Longest record of a replica, without its kind, in bytes.
pub const REPLICA_RECORD_BYTES_MAX: usize = 1 << 20;
/// Most bytes of digests in one answer of a replica.
pub const REPLICA_DIGESTS_BYTES_MAX: usize = 128 << 10;
/// The maximum number of bytes of the digests of a chunk's blocks: 16 for each of 64.
pub const REPLICA_BLOCKS_BYTES_MAX: usize = 1024;
/// Most disks of a replica.
pub const REPLICA_DISKS_MAX: usize = 256;
/// Most bytes of a parcel's device that one message reads or writes: a cell.
pub const PARCEL_TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Largest device of a parcel at a terminal, in bytes.
pub const PARCEL_DEVICE_BYTES_MAX: u64 = 1 << 50;
/// Largest disk of a replica, in bytes.
pub const REPLICA_DISK_BYTES_MAX: u64 = 1 << 50;
