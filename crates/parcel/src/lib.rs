//! Parcels: sets of devices that carry guests' disks to another site by courier.
//!
//! [`Writer`] appends records to a parcel's devices, and seals it once everything has been read
//! back. [`Parcel`] opens devices, says what is missing or damaged, recovers it from parity, and
//! reads the records in bounded memory.
//!
//! docs/parcel.md describes the format.

mod aligned;
mod bisect;
mod cell;
mod date;
mod device;
mod direct;
mod header;
mod import;
mod job;
mod key;
mod layout;
#[cfg(test)]
mod lives;
mod lock;
mod log;
mod media;
mod parity;
pub mod plan;
mod queue;
mod reader;
mod record;
mod replica;
mod report;
mod room;
mod row;
mod tree;
mod writer;

pub use cell::{BODY_BYTES, CELL_BYTES, Cell, Kind, Name};
pub use date::{Date, ParseDateError};
pub use device::{Device, DeviceError};
pub use header::{Earlier, GENERATIONS_MAX, Header, HeaderError, ParcelId, Proof};
pub use import::{ImportError, Imported, ImportedDisk, ImportedGuest, import};
pub use job::{
    Asked, Attachment, Checked, CheckedDisk, Confirmation, DeviceStatus, DiskStatus, Frozen,
    GuestStatus, Job, JobDisk, JobError, JobGuest, MomentOf, Newest, Reading, ReplicaLink,
    Replicated, Replication, Schedule, Seal, SealedDisk, Shipment, Status, Step, Tracking,
    Untracked, Verdict,
};
pub use key::{DataKey, Fingerprint, KeyError};
pub use layout::{DEVICES_MAX, Layout, LayoutError, Roles};
pub use log::{LogReader, PLAIN_BYTES};
pub use media::{Found, LocalMedia, Media, Medium, SharedPlace};
pub use reader::{Damage, OpenError, Parcel, ReadError, Report};
pub use record::{
    CHUNK_BYTES, Chunk, Disk, Guest, MomentId, Record, RecordError, Version, VersionDisk,
};
pub use replica::{
    Replica, ReplicaDisk, ReplicaError, ReplicaId, ReplicaSpec, ReplicaVersion, ReplicaVersionDisk,
    Retention,
};
pub use report::{
    DeviceState, ImportReport, REPORT_BYTES_MAX, ReportError, ReportedDevice, ReportedDisk,
    SignedReport,
};
pub use writer::{Position, Settings, WriteError, Writer};
