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
    let page = include_str!("../../../../docs/wire.md");
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
    let seed = include_bytes!("../../../../fuzz/seeds/message/offer-on-a-base");
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
        include_bytes!("../../../../fuzz/seeds/message/query-files"),
        include_bytes!("../../../../fuzz/seeds/message/offer-files"),
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
                managed: Some(Managed {
                    by: Manager::Libvirt,
                    cookie: vec![7; 3],
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
        include_bytes!("../../../../fuzz/seeds/message/query-ports"),
        include_bytes!("../../../../fuzz/seeds/message/offer-ports"),
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
