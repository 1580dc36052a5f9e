//! The versions of the messages, and what came with each.

/// Newest version of the messages.
pub const VERSION: u16 = 3;
/// Oldest supported version. It has no messages about files that do not move.
pub const VERSION_OLDEST: u16 = 1;
/// The first version in which files that do not move are proved to be the same.
pub const VERSION_OF_FILES: u16 = 2;
/// The first version in which read-only images move along if the destination lacks them.
pub const VERSION_OF_IMAGES: u16 = 3;
/// The first version in which the ports of a guest's cards travel.
pub const VERSION_OF_PORTS: u16 = 3;
/// The first version in which frames for a stopped guest travel.
pub const VERSION_OF_HELD_FRAMES: u16 = 3;
/// The first version in which a guest's flows through gateways travel.
pub const VERSION_OF_FLOWS: u16 = 3;
/// The first version in which a commit may need an arbiter's lease.
pub const VERSION_OF_ARBITERS: u16 = 3;
/// The first version in which a plan asks for content that the destination has.
pub const VERSION_OF_KNOWN: u16 = 3;
/// The first version in which a guest's memory may follow when it runs at the destination.
pub const VERSION_OF_POSTCOPY: u16 = 3;
/// The first version in which the destination tells of the cost of a drain and the guest's rate.
pub const VERSION_OF_RATES: u16 = 3;
/// The first version in which devices of parcels may be attached to another host.
pub const VERSION_OF_TERMINALS: u16 = 3;
/// The first version in which frames may have runs of known content.
pub const VERSION_OF_RUNS: u16 = 3;
