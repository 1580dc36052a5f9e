//! The encoding of messages: postcard (its published wire format 1.0), one message per control
//! frame.
//!
//! The Hello of a connection negotiates the version of the messages; [`VERSION`] is the newest that
//! this code supports.

use crate::disk::{Base, OfferedDisk, Remaining, STRIPE_BYTES, STRIPE_PAGES};
use crate::files::FileClaim;
use crate::guest::GuestDescription;
use crate::held_frames::{self, HeldFrames};
use crate::limits::{
    ACKNOWLEDGED_MAX, CONTROL_MESSAGE_BYTES_MAX, COOKIE_BYTES_MAX, CPU_PROPERTIES_MAX,
    DEVICE_STATE_BYTES_MAX, DEVICES_MAX, FILES_MAX, HOT_STRIPES_MAX, NAME_BYTES_MAX,
    PATH_BYTES_MAX, PRELUDE_BYTES_MAX, RANGES_MAX, REGION_BLOCKS_MAX, REGIONS_MAX, REMAINING_MAX,
    SAMPLES_MAX,
};
use crate::machine::Machine;
use crate::message::{Acknowledgement, DisksOffer, FilesOffer, Offer, ToDestination, ToSource};
use crate::port::CardPort;
use crate::{BLOCK_SIZE, BlockRange, RegionSpec};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::versions::*;

/// A reason why bytes are not a message, or one that breaks a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Longer than any message may be.
    #[error("a message of {bytes} bytes is over the limit of {limit}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not a message of a version that this program speaks.
    #[error("not a message of a known version: {0}")]
    Malformed(String),
    /// Bytes after the message's end.
    #[error("{bytes} bytes follow the end of a message")]
    Trailing {
        /// Their number.
        bytes: usize,
    },
    /// Well formed, but over a limit.
    #[error("{what} is over its limit of {limit}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}

/// A message type: between agents, or of another protocol with the same encoding.
pub trait Message: Serialize + DeserializeOwned {
    /// Most bytes of a message.
    const BYTES_MAX: usize = CONTROL_MESSAGE_BYTES_MAX;

    /// Checks the limits of the format.
    fn check(&self) -> Result<(), WireError>;
}

/// Returns the bytes of a message.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, WireError> {
    message.check()?;
    let bytes =
        postcard::to_stdvec(message).map_err(|error| WireError::Malformed(error.to_string()))?;
    within_limit::<M>(bytes.len())?;
    Ok(bytes)
}

/// Parses a message.
pub fn decode<M: Message>(bytes: &[u8]) -> Result<M, WireError> {
    within_limit::<M>(bytes.len())?;
    let (message, rest) = postcard::take_from_bytes::<M>(bytes)
        .map_err(|error| WireError::Malformed(error.to_string()))?;
    if !rest.is_empty() {
        return Err(WireError::Trailing { bytes: rest.len() });
    }
    message.check()?;
    Ok(message)
}

fn within_limit<M: Message>(bytes: usize) -> Result<(), WireError> {
    let limit = M::BYTES_MAX;
    match bytes <= limit {
        true => Ok(()),
        false => Err(WireError::TooLong { bytes, limit }),
    }
}

/// Checks a quantity of a message against its limit.
pub fn limit(what: &'static str, value: u64, limit: u64) -> Result<(), WireError> {
    if value <= limit {
        Ok(())
    } else {
        Err(WireError::Limit { what, limit })
    }
}

fn name(what: &'static str, text: &str) -> Result<(), WireError> {
    limit(what, text.len() as u64, NAME_BYTES_MAX as u64)
}

fn check_files(files: &[FileClaim]) -> Result<(), WireError> {
    let count = files.len() as u64;
    limit("the number of files", count, FILES_MAX as u64)?;
    files.iter().try_for_each(|file| {
        name("a file's name", &file.name)?;
        let path = file.path.len() as u64;
        limit("a file's path", path, PATH_BYTES_MAX as u64)?;
        match file.locks.is_none_or(|locks| locks.is_sound()) {
            true => Ok(()),
            false => Err(WireError::Malformed(
                "a pattern of locks that is none".to_owned(),
            )),
        }
    })
}

fn check_ports(guest: &GuestDescription, ports: &[CardPort]) -> Result<(), WireError> {
    let cards = guest.nics.len() as u64;
    limit("the number of ports", ports.len() as u64, cards)?;
    ports.iter().try_for_each(|card| {
        limit("the number of a card", u64::from(card.nic) + 1, cards)?;
        match card.port.is_sound() {
            true => Ok(()),
            false => Err(WireError::Malformed("a port that cannot be".to_owned())),
        }
    })
}

fn check_machine(machine: &Machine) -> Result<(), WireError> {
    limit(
        "the number of RAM blocks",
        machine.ram_blocks.len() as u64,
        REGIONS_MAX as u64,
    )?;
    limit(
        "the number of devices",
        machine.devices.len() as u64,
        DEVICES_MAX as u64,
    )?;
    let properties = machine.cpu_properties.len() as u64;
    limit(
        "the number of CPU properties",
        properties,
        CPU_PROPERTIES_MAX as u64,
    )
}

fn check_range(range: &BlockRange) -> Result<(), WireError> {
    limit(
        "a range's end",
        range.start.saturating_add(range.count),
        REGION_BLOCKS_MAX,
    )
}

fn check_region(region: &RegionSpec) -> Result<(), WireError> {
    name("a region's name", &region.name)?;
    limit(
        "a region's length in blocks",
        region.blocks,
        REGION_BLOCKS_MAX,
    )
}

impl Offer {
    fn check(&self) -> Result<(), WireError> {
        name("a guest's name", &self.guest.name)?;
        check_machine(&self.machine)?;
        limit(
            "the number of regions",
            self.regions.len() as u64,
            REGIONS_MAX as u64,
        )?;
        self.regions.iter().try_for_each(check_region)
    }
}

impl DisksOffer {
    fn check(&self) -> Result<(), WireError> {
        self.offer.check()?;
        check_disks(&self.disks)
    }
}

fn check_disks(disks: &[OfferedDisk]) -> Result<(), WireError> {
    let count = disks.len() as u64;
    limit("the number of disks", count, REGIONS_MAX as u64)?;
    let bases = disks.iter().filter_map(|disk| disk.base.as_ref());
    let hot = bases.map(|base| base.hot.len() as u64).sum();
    limit("the number of hot stripes", hot, HOT_STRIPES_MAX as u64)?;
    disks.iter().try_for_each(|disk| {
        name("a disk's name", &disk.name)?;
        check_length(disk.image_bytes)?;
        disk.base.iter().try_for_each(check_base)
    })
}

fn check_base(base: &Base) -> Result<(), WireError> {
    check_length(base.bytes)?;
    base.hot.iter().try_for_each(|hot| {
        let behind = base.bytes.div_ceil(STRIPE_BYTES);
        limit("a hot stripe", u64::from(hot.stripe) + 1, behind)?;
        limit(
            "the pages of a stripe",
            hot.pages.into(),
            STRIPE_PAGES.into(),
        )
    })
}

fn check_length(image_bytes: u64) -> Result<(), WireError> {
    let bytes_max = REGION_BLOCKS_MAX * BLOCK_SIZE as u64;
    limit("a disk's length in bytes", image_bytes, bytes_max)
}

fn check_remaining(remaining: &[Remaining]) -> Result<(), WireError> {
    let entries = remaining.len() as u64;
    limit(
        "the number of entries in a list",
        entries,
        REMAINING_MAX as u64,
    )
}

fn check_held(held: &HeldFrames) -> Result<(), WireError> {
    let count = held.frames.len() as u64;
    limit(
        "the number of held frames",
        count,
        held_frames::FRAMES_MAX as u64,
    )?;
    let bytes = held.bytes() as u64;
    limit(
        "the bytes of held frames",
        bytes,
        held_frames::TOTAL_BYTES_MAX as u64,
    )?;
    held.frames.iter().try_for_each(|frame| {
        let bytes = frame.bytes.len() as u64;
        limit("a held frame", bytes, held_frames::FRAME_BYTES_MAX as u64)
    })
}

fn check_ranges(ranges: &[BlockRange]) -> Result<(), WireError> {
    let count = ranges.len() as u64;
    limit("the number of ranges", count, RANGES_MAX as u64)?;
    ranges.iter().try_for_each(check_range)
}

impl Message for ToDestination {
    fn check(&self) -> Result<(), WireError> {
        let state_max = DEVICE_STATE_BYTES_MAX as u64;
        match self {
            Self::Query(query) => check_machine(&query.machine),
            Self::Offer(offer) => offer.check(),
            Self::Start { prelude } => {
                limit("a prelude", prelude.len() as u64, PRELUDE_BYTES_MAX as u64)
            }
            Self::Complete {
                device_state_bytes, ..
            } => limit("a device state", u64::from(*device_state_bytes), state_max),
            Self::VerifyRegion { range, .. } => check_range(range),
            Self::OfferDisks(offer) => offer.check(),
            Self::QueryFiles(asked) => {
                check_machine(&asked.query.machine)?;
                check_files(&asked.files)
            }
            Self::OfferFiles(offered) => {
                offered.offer.check()?;
                check_files(&offered.files)
            }
            Self::QueryKnown(asked) => {
                asked.offered.check()?;
                let count = asked.samples.len() as u64;
                limit("the number of sampled blocks", count, SAMPLES_MAX as u64)
            }
            Self::QueryPorts(asked) => {
                check_machine(&asked.asked.query.machine)?;
                check_files(&asked.asked.files)?;
                check_disks(&asked.disks)?;
                check_ports(&asked.asked.query.guest, &asked.ports)?;
                let managed = asked.managed.as_ref();
                managed.map_or(Ok(()), |managed| check_cookie(&managed.cookie))
            }
            Self::OfferPorts(offered) => {
                let FilesOffer { offer, files } = &offered.offered;
                offer.check()?;
                check_files(files)?;
                check_ports(&offer.offer.guest, &offered.ports)?;
                let managed = offered.managed.as_ref();
                managed.map_or(Ok(()), |managed| check_cookie(&managed.cookie))
            }
            Self::Departed { cookie } => check_cookie(cookie),
            Self::Replicate(offer) => offer.check(),
            Self::List(list) => check_remaining(&list.remaining),
            Self::Unreadable { ranges, .. } => check_ranges(ranges),
            Self::Length { bytes, .. } => check_length(*bytes),
            Self::HeldFrames(held) => check_held(held),
            Self::Flows(flows) => flows.check(),
            Self::Resume { .. }
            | Self::Ask { .. }
            | Self::Verified
            | Self::Commit { .. }
            | Self::Cancel { .. }
            | Self::Done
            | Self::Overruled { .. }
            | Self::Arbiter { .. }
            | Self::CommitWithLease { .. }
            | Self::ParcelDevice => Ok(()),
        }
    }
}

fn check_cookie(cookie: &[u8]) -> Result<(), WireError> {
    limit("a cookie", cookie.len() as u64, COOKIE_BYTES_MAX as u64)
}

impl Message for ToSource {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Accepted { machine } => check_machine(machine),
            Self::Prepared { cookie } => check_cookie(cookie),
            Self::Digests { range, .. } => check_range(range),
            Self::Missing(missing) => check_remaining(&missing.lacks),
            Self::Want { ranges, .. } | Self::Superseded { ranges, .. } => check_ranges(ranges),
            Self::WantContent { files } | Self::AnswerLacking { files, .. } => {
                let count = files.len() as u64;
                limit("the number of files", count, FILES_MAX as u64)
            }
            _ => Ok(()),
        }
    }
}

impl Message for Acknowledgement {
    fn check(&self) -> Result<(), WireError> {
        let max = ACKNOWLEDGED_MAX as u64;
        limit(
            "the number of acknowledged runs",
            self.applied.len() as u64,
            max,
        )?;
        limit(
            "the number of rejected ranges",
            self.rejected.len() as u64,
            max,
        )?;
        self.rejected
            .iter()
            .try_for_each(|(_, range)| check_range(range))
    }
}

#[cfg(test)]
mod tests;
