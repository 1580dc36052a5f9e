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
                check_ports(&asked.asked.query.guest, &asked.ports)
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
mod tests {
    use super::*;
    use crate::disk::{DiskFormat, Hot, List, Missing, OfferedDisk, Pulled};
    use crate::files::{FileContent, FileKind, LockPattern};
    use crate::guest::Nic;
    use crate::guest::{Managed, Manager};
    use crate::message::{Answer, ArbiterQuery, FilesQuery, PortsOffer, PortsQuery, Query};
    use crate::port::Port;
    use crate::{Attempt, Epoch, Generation, MigrationId, RegionId, StoreId};
    use proptest::prelude::*;

    #[test]
    fn a_message_survives_its_bytes() {
        let commit = ToDestination::Commit {
            attempt: Attempt(1),
            generation: Generation(300),
        };
        let bytes = encode(&commit).unwrap();
        assert_eq!(bytes, [8, 1, 0xac, 0x02]);
        assert_eq!(decode::<ToDestination>(&bytes), Ok(commit));
    }

    #[test]
    fn the_examples_of_the_documentation_are_true() {
        let page = include_str!("../../../docs/wire.md");
        let commit = ToDestination::Commit {
            attempt: Attempt(1),
            generation: Generation(300),
        };
        let complete = ToDestination::Complete {
            epoch: Epoch(2),
            frames: 1000,
            early_bytes: 5,
            device_state_bytes: 2048,
        };
        let rejected = vec![(RegionId(1), BlockRange::new(5, 1))];
        let acknowledgement = Acknowledgement {
            applied: vec![(7, 3)],
            rejected,
            sync_us: 300,
        };
        let list = ToDestination::List(List {
            region: RegionId(5),
            from_chunk: 0,
            from_seq: 900,
            remaining: vec![Remaining {
                chunk: 7,
                chunks: 1,
                mask: 3,
                written_blocks: 130,
            }],
            next_chunk: None,
        });
        let length = ToDestination::Length {
            region: RegionId(5),
            bytes: 3 << 16,
        };
        let lacking = ToSource::AnswerLacking {
            answer: Answer {
                host: "paris".to_owned(),
                checks: Vec::new(),
            },
            files: vec![2],
        };
        let examples = [
            encode(&commit),
            encode(&complete),
            encode(&acknowledgement),
            encode(&list),
            encode(&length),
            encode(&ToSource::WantContent { files: vec![0, 3] }),
            encode(&lacking),
        ];
        for bytes in examples.map(Result::unwrap) {
            let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let line = format!("\n{}\n", hex.join(" "));
            assert!(page.contains(&line), "docs/wire.md lacks {line}");
        }
    }

    #[test]
    fn limits_hold_in_both_directions() {
        let long = ToDestination::Start {
            prelude: vec![0; PRELUDE_BYTES_MAX + 1],
        };
        assert!(matches!(encode(&long), Err(WireError::Limit { .. })));
        let bytes = postcard::to_stdvec(&long).unwrap();
        assert!(matches!(
            decode::<ToDestination>(&bytes),
            Err(WireError::Limit { .. })
        ));
        let complete = ToDestination::Complete {
            epoch: Epoch(1),
            frames: 1,
            early_bytes: 0,
            device_state_bytes: DEVICE_STATE_BYTES_MAX as u32 + 1,
        };
        assert!(matches!(encode(&complete), Err(WireError::Limit { .. })));
    }

    #[test]
    fn what_disks_say_keeps_to_its_limits() {
        let part = Remaining {
            chunk: 3,
            chunks: 2,
            mask: 5,
            written_blocks: 9,
        };
        let mut list = List {
            remaining: vec![part],
            ..List::nothing(RegionId(4))
        };
        let message = ToDestination::List(list.clone());
        assert_eq!(decode(&encode(&message).unwrap()), Ok(message));
        list.remaining = vec![part; REMAINING_MAX + 1];
        let over = encode(&ToDestination::List(list));
        assert!(matches!(over, Err(WireError::Limit { .. })));
        let mut missing = Missing {
            region: RegionId(4),
            from_chunk: 0,
            to_chunk: 9,
            lacks: vec![part; REMAINING_MAX],
        };
        assert!(encode(&ToSource::Missing(missing.clone())).is_ok());
        missing.lacks.push(part);
        let over = encode(&ToSource::Missing(missing));
        assert!(matches!(over, Err(WireError::Limit { .. })));
        for count in [RANGES_MAX, RANGES_MAX + 1] {
            let ranges = vec![BlockRange::new(7, 1); count];
            let region = RegionId(4);
            let want = ToSource::Want {
                region,
                ranges: ranges.clone(),
            };
            let superseded = ToSource::Superseded { region, ranges };
            for message in [want, superseded] {
                assert_eq!(encode(&message).is_ok(), count == RANGES_MAX);
            }
        }
        for (bytes, right) in [(1 << 44, true), ((1 << 44) + 1, false)] {
            let region = RegionId(4);
            let length = ToDestination::Length { region, bytes };
            assert_eq!(encode(&length).is_ok(), right);
        }
        let far = ToSource::Want {
            region: RegionId(4),
            ranges: vec![BlockRange::new(REGION_BLOCKS_MAX, 1)],
        };
        assert!(matches!(encode(&far), Err(WireError::Limit { .. })));
    }

    fn an_offer() -> Offer {
        let guest = GuestDescription {
            name: "web".to_owned(),
            machine: String::new(),
            cpu: String::new(),
            vcpus: 1,
            memory_mib: 64,
            firmware: None,
            kernel: None,
            disks: Vec::new(),
            nics: Vec::new(),
            channels: Vec::new(),
            hardware: None,
        };
        let machine = Machine {
            qemu: String::new(),
            machine_type: String::new(),
            accelerator: String::new(),
            vcpus: 1,
            ram_blocks: Default::default(),
            devices: Default::default(),
            cpu_properties: Default::default(),
        };
        Offer {
            migration: MigrationId([1; 8]),
            attempt: Attempt(1),
            generation: Generation(0),
            guest,
            machine,
            regions: Vec::new(),
            digest_key: [5; 32],
            paused: false,
            verify: false,
            patience_ms: 1,
            early_release: false,
        }
    }

    /// Returns an offer of a guest with disks on base images of 8 stripes and a bit, with these hot
    /// stripes.
    fn on_bases(hot: &[Vec<Hot>]) -> ToDestination {
        let base = |hot: &Vec<Hot>| Base {
            image: [7; 32],
            bytes: 8 * STRIPE_BYTES + 1,
            lazily: true,
            hot: hot.clone(),
        };
        let disk = |hot| OfferedDisk {
            region: RegionId(1),
            name: "vda".to_owned(),
            image_bytes: 1 << 20,
            allocated_bytes: 1 << 16,
            format: DiskFormat::Raw,
            pulled: Pulled::Nothing,
            base: Some(base(hot)),
        };
        let offer = an_offer();
        let disks = hot.iter().map(disk).collect();
        ToDestination::OfferDisks(Box::new(DisksOffer { offer, disks }))
    }

    #[test]
    fn held_frames_keep_to_their_limits() {
        let frame = |bytes| held_frames::HeldFrame {
            card: 1,
            header: [0; held_frames::HEADER_BYTES],
            bytes: vec![7; bytes],
        };
        let message = |frames| ToDestination::HeldFrames(HeldFrames { frames });
        let (longest, most) = (held_frames::FRAME_BYTES_MAX, held_frames::FRAMES_MAX);
        for frames in [vec![frame(longest)], vec![frame(0); most]] {
            let message = message(frames);
            assert_eq!(decode(&encode(&message).unwrap()), Ok(message));
        }
        let all = held_frames::TOTAL_BYTES_MAX / longest + 1;
        for frames in [
            vec![frame(longest + 1)],
            vec![frame(0); most + 1],
            vec![frame(longest); all],
        ] {
            let bytes = postcard::to_stdvec(&message(frames)).unwrap();
            let refused = decode::<ToDestination>(&bytes);
            assert!(
                matches!(refused, Err(WireError::Limit { .. })),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn what_is_hot_of_base_images_keeps_to_its_limits() {
        let hot = |stripe, pages| Hot { stripe, pages };
        let good = on_bases(&[vec![hot(8, 64), hot(0, 1)]]);
        let bytes = encode(&good).unwrap();
        assert_eq!(decode(&bytes), Ok(good));
        let seed = include_bytes!("../../../fuzz/seeds/message/offer-on-a-base");
        assert_eq!(bytes, seed);
        for over in [
            vec![vec![hot(9, 1)]],
            vec![vec![hot(1, 65)]],
            // Over all disks together.
            vec![vec![hot(1, 1); HOT_STRIPES_MAX / 2 + 1]; 2],
        ] {
            let over = on_bases(&over);
            assert!(matches!(encode(&over), Err(WireError::Limit { .. })));
            let bytes = postcard::to_stdvec(&over).unwrap();
            let read = decode::<ToDestination>(&bytes);
            assert!(matches!(read, Err(WireError::Limit { .. })));
        }
        let most = on_bases(&vec![vec![hot(8, 64); HOT_STRIPES_MAX / 2]; 2]);
        assert!(encode(&most).is_ok());
    }

    fn claim() -> FileClaim {
        FileClaim {
            kind: FileKind::Image,
            name: "s".to_owned(),
            path: "/srv/s.img".to_owned(),
            locks: Some(LockPattern {
                first: (1 << 62) + 128,
                mask: [0x0f; 16],
            }),
            content: None,
        }
    }

    /// Returns a question and an offer of a guest with these files.
    fn of_files(files: &[FileClaim]) -> [ToDestination; 2] {
        let offer = an_offer();
        let query = Query {
            guest: offer.guest.clone(),
            machine: offer.machine.clone(),
        };
        let (files, disks) = (files.to_vec(), Vec::new());
        let asked = FilesQuery {
            query,
            files: files.clone(),
        };
        let offered = FilesOffer {
            offer: DisksOffer { offer, disks },
            files,
        };
        [
            ToDestination::QueryFiles(Box::new(asked)),
            ToDestination::OfferFiles(Box::new(offered)),
        ]
    }

    #[test]
    fn what_is_said_of_files_keeps_to_its_limits() {
        let mut known = claim();
        known.content = Some(FileContent {
            bytes: 300,
            digest: [9; 32],
        });
        let seeds: [&[u8]; 2] = [
            include_bytes!("../../../fuzz/seeds/message/query-files"),
            include_bytes!("../../../fuzz/seeds/message/offer-files"),
        ];
        for (message, seed) in of_files(&[claim(), known]).into_iter().zip(seeds) {
            let bytes = encode(&message).unwrap();
            assert_eq!(bytes, seed);
            assert_eq!(decode(&bytes), Ok(message));
        }
        let one = |change: &dyn Fn(&mut FileClaim)| {
            let mut claim = claim();
            change(&mut claim);
            vec![claim]
        };
        let pattern = |first, mask| Some(LockPattern { first, mask });
        for (over, files) in [
            (false, vec![claim(); FILES_MAX]),
            (true, vec![claim(); FILES_MAX + 1]),
            (false, one(&|it| it.path = "x".repeat(PATH_BYTES_MAX))),
            (true, one(&|it| it.path = "x".repeat(PATH_BYTES_MAX + 1))),
            (true, one(&|it| it.name = "x".repeat(NAME_BYTES_MAX + 1))),
            (false, one(&|it| it.locks = None)),
            // All bytes, none, and ones that may overlap data.
            (true, one(&|it| it.locks = pattern(1 << 62, [0xff; 16]))),
            (true, one(&|it| it.locks = pattern(1 << 62, [0; 16]))),
            (true, one(&|it| it.locks = pattern(100, [0x0f; 16]))),
        ] {
            for message in of_files(&files) {
                assert_eq!(encode(&message).is_err(), over, "{files:?}");
                let bytes = postcard::to_stdvec(&message).unwrap();
                assert_eq!(decode::<ToDestination>(&bytes).is_err(), over);
            }
        }
        for (count, right) in [(FILES_MAX, true), (FILES_MAX + 1, false)] {
            let files = vec![0; count];
            assert_eq!(encode(&ToSource::WantContent { files }).is_ok(), right);
        }
    }

    #[test]
    fn ports_keep_to_the_cards_of_their_guest() {
        let mut offer = an_offer();
        offer.guest.nics = vec![Nic {
            network: "office".to_owned(),
            mac: "52:54:00:12:34:56".to_owned(),
            port: None,
        }];
        let with = |nic, mtu| {
            let port = Port {
                vlans: Port::untagged(10),
                mtu: Some(mtu),
                flags: Default::default(),
            };
            let ports = vec![CardPort { nic, port }];
            let query = Query {
                guest: offer.guest.clone(),
                machine: offer.machine.clone(),
            };
            let asked = FilesQuery {
                query,
                files: Vec::new(),
            };
            let offered = FilesOffer {
                offer: DisksOffer {
                    offer: offer.clone(),
                    disks: Vec::new(),
                },
                files: vec![claim()],
            };
            [
                ToDestination::QueryPorts(Box::new(PortsQuery {
                    asked,
                    ports: ports.clone(),
                    disks: Vec::new(),
                    generation: Generation(1),
                    memory: Pulled::Often,
                    arbiter: Some(ArbiterQuery {
                        store: StoreId([9; 16]),
                        required: true,
                    }),
                })),
                ToDestination::OfferPorts(Box::new(PortsOffer {
                    offered,
                    ports,
                    memory: Pulled::All,
                    managed: Some(Managed {
                        by: Manager::Libvirt,
                        cookie: vec![7; 3],
                    }),
                })),
            ]
        };
        let seeds: [&[u8]; 2] = [
            include_bytes!("../../../fuzz/seeds/message/query-ports"),
            include_bytes!("../../../fuzz/seeds/message/offer-ports"),
        ];
        for (message, seed) in with(0, 9000).into_iter().zip(seeds) {
            let bytes = encode(&message).unwrap();
            assert_eq!(bytes, seed);
            assert_eq!(decode(&bytes), Ok(message));
        }
        for message in with(1, 9000).into_iter().chain(with(0, 9)) {
            assert!(encode(&message).is_err());
            let bytes = postcard::to_stdvec(&message).unwrap();
            assert!(decode::<ToDestination>(&bytes).is_err());
        }
    }

    #[test]
    fn what_follows_a_message_is_refused() {
        let mut bytes = encode(&ToSource::Loaded).unwrap();
        bytes.push(0);
        assert_eq!(
            decode::<ToSource>(&bytes),
            Err(WireError::Trailing { bytes: 1 })
        );
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<ToDestination>(&bytes);
            let _ = decode::<ToSource>(&bytes);
            let _ = decode::<Acknowledgement>(&bytes);
        }

        #[test]
        fn acknowledgements_survive(
            applied in proptest::collection::vec((any::<u64>(), any::<u32>()), 0..20),
            start in 0u64..1 << 31, count in 0u64..1 << 31, sync_us in any::<u32>(),
        ) {
            let message = Acknowledgement {
                applied,
                rejected: vec![(RegionId(3), BlockRange { start, count })],
                sync_us,
            };
            prop_assert_eq!(decode(&encode(&message).unwrap()), Ok(message));
        }

        #[test]
        fn a_resume_survives(
            id in any::<[u8; 8]>(), attempt in any::<u32>(), epoch in any::<u32>()
        ) {
            let message = ToDestination::Resume {
                migration: MigrationId(id), attempt: Attempt(attempt), epoch: Epoch(epoch),
            };
            prop_assert_eq!(decode(&encode(&message).unwrap()), Ok(message));
        }
    }
}
