//! Parcels: sets of devices that carry guests' disks to another site by courier.
//!
//! [`Writer`] appends records to a parcel's devices, and seals it once everything has been read
//! back. [`Parcel`] opens devices, says what is missing or damaged, recovers it from parity, and
//! reads the records in bounded memory.
//!
//! docs/parcel.md describes the format.

mod bisect;
mod cell;
mod device;
mod header;
mod import;
mod job;
mod key;
mod layout;
#[cfg(test)]
mod lives;
mod log;
mod parity;
mod reader;
mod record;
mod room;
mod row;
mod tree;
mod writer;

pub use cell::{BODY_BYTES, CELL_BYTES, Cell, Kind, Name};
pub use device::{Device, DeviceError};
pub use header::{Earlier, GENERATIONS_MAX, Header, HeaderError, ParcelId, Proof};
pub use import::{ImportError, ImportedDisk, import};
pub use job::{Job, JobDisk, JobError, JobGuest, Step};
pub use key::{DataKey, Fingerprint, KeyError};
pub use layout::{DEVICES_MAX, Layout, LayoutError, Roles};
pub use log::{LogReader, PLAIN_BYTES};
pub use reader::{Damage, OpenError, Parcel, ReadError, Report};
pub use record::{CHUNK_BYTES, Chunk, Disk, Guest, Record, RecordError, Version, VersionDisk};
pub use writer::{Position, Settings, WriteError, Writer};
