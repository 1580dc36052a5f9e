//! Tests a trusted host that turned hostile against a real agent: its messages use no more
//! resources than it is allowed, and others are served meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[allow(unreachable_pub)]
mod hostile {
    pub mod peer;
}

use common::LIMIT;
use hostile::peer::{Bad, End, Victim, absurd, empty_machine, guest, offer};
use longhaul_codec::{BlockId, Compression, Decision, Encoder, FRAME_VERSION};
use longhaul_protocol::message::{RefusalCode, ToDestination, ToSource, Verdict};
use longhaul_protocol::piece::PIECE_BYTES;
use longhaul_protocol::terminal::{DeviceFault, FromTerminal, ToTerminal};
use longhaul_protocol::{Attempt, BLOCK_SIZE, Epoch, Generation, MigrationId, RegionId};
use std::time::Duration;
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn absurd_offers_are_refused_before_anything_is_made() {
    let victim = Victim::start("");
    let bad = Bad::new("bad", &victim).await;
    let honest = Bad::new("honest", &victim).await;
    let before = victim.uses();
    for (what, offer) in absurd() {
        match bad.first(&ToDestination::Offer(Box::new(offer))).await {
            End::Said(ToSource::Refused(refusal)) => {
                assert!(
                    refusal.text.len() < 4096,
                    "{what}: a refusal of {}",
                    refusal.text.len()
                );
                assert!(
                    !refusal.text.contains(['\n', '\0', '\u{1b}']),
                    "{what}: {refusal:?}"
                );
            }
            End::Closed(_) => {}
            other => panic!("{what}: {other:?}"),
        }
    }
    let after = victim.uses();
    assert_eq!(after.journals, 0, "{after:?}");
    assert_eq!(after.guests, 0, "{after:?}");
    assert!(
        after.memory_kib < before.memory_kib + (256 << 10),
        "{before:?} {after:?}"
    );
    honest.is_answered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_offers_take_what_is_allowed_and_others_are_served() {
    let victim = Victim::start("[limits]\nattempts_per_hour = 40\n");
    let bad = Bad::new("bad", &victim).await;
    let honest = Bad::new("honest", &victim).await;
    honest.is_answered().await;
    let before = victim.uses();
    let mut refused_for_the_limit = 0;
    for round in 0..16 {
        let offers = (0..63u8).map(|n| {
            let mut offer = offer(&format!("g{round}-{n}"), empty_machine());
            offer.migration = MigrationId([7, round, n, 0, 0, 0, 0, 0]);
            let bad = &bad;
            async move { bad.first(&ToDestination::Offer(Box::new(offer))).await }
        });
        for end in futures_util::future::join_all(offers).await {
            match end {
                End::Said(ToSource::Refused(refusal)) if refusal.code == RefusalCode::Busy => {
                    let hint = refusal.hint.unwrap();
                    refused_for_the_limit += usize::from(hint.contains("attempts_per_hour"));
                }
                End::Said(ToSource::Refused(_)) | End::Closed(_) => {}
                other => panic!("{other:?}"),
            }
        }
        honest.is_answered().await;
    }
    assert!(refused_for_the_limit > 900, "{refused_for_the_limit}");
    let after = victim.uses();
    assert!(after.journals <= 40, "{after:?}");
    assert_eq!(after.guests, 0, "{after:?}");
    assert!(
        after.memory_kib < before.memory_kib + (128 << 10),
        "{before:?} {after:?}"
    );
    assert!(after.files <= before.files + 16, "{before:?} {after:?}");
    // At most one for each channel that a peer may have.
    assert!(after.threads <= before.threads + 64, "{before:?} {after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_questions_and_inquiries_end_at_their_limits() {
    let victim = Victim::start("[limits]\nattempts_per_hour = 25\nqueries_per_minute = 30\n");
    let bad = Bad::new("bad", &victim).await;
    let honest = Bad::new("honest", &victim).await;
    let mut refused = 0;
    for _ in 0..60 {
        match bad.query(&guest("web-7"), empty_machine()).await {
            End::Said(ToSource::Answer(answer)) => {
                let reached = |text: &str| text.contains("30 times a minute");
                let check = &answer.checks[0];
                refused += usize::from(check.verdict == Verdict::Refused && reached(&check.text));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(refused >= 28, "{refused}");
    // Each question about an unknown attempt creates one journal, and so counts as one attempt.
    let (mut aborted, mut closed) = (0, 0);
    for n in 0..60u8 {
        let ask = ToDestination::Ask {
            migration: MigrationId([8, n, 0, 0, 0, 0, 0, 0]),
            attempt: Attempt(1),
        };
        match bad.first(&ask).await {
            End::Said(ToSource::Aborted { .. }) => aborted += 1,
            End::Closed(reason) => {
                assert!(reason.contains("attempts_per_hour"), "{reason}");
                closed += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!((25..=27).contains(&aborted), "{aborted}");
    assert_eq!(aborted + closed, 60);
    assert_eq!(victim.uses().journals, aborted);
    honest.is_answered().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_overtaken_by_the_end_leaves_no_journal() {
    let victim = Victim::start("");
    let source = Bad::new("source", &victim).await;
    let machine = victim.machine(&guest("web-7")).await;
    let offer = offer("web-7", machine);
    let (migration, attempt) = (offer.migration, offer.attempt);
    let ask = ToDestination::Ask { migration, attempt };
    let mut call = source.call(&ask).await;
    assert!(matches!(call.next().await, ToSource::Aborted { .. }));
    assert_eq!(victim.uses().journals, 1);
    call.say(&ToDestination::Done).await;
    assert_eq!(call.next().await, ToSource::Closed);
    assert_eq!(source.call(&ask).await.next().await, ToSource::Closed);
    assert_eq!(victim.uses().journals, 0);
    // The source has forgotten it, and would never fetch the results of an attempt.
    let refusal = source.refused(offer.clone()).await;
    assert!(refusal.text.contains("is over"), "{refusal:?}");
    assert_eq!(victim.uses().journals, 0);
    let mut next = offer;
    next.attempt = Attempt(2);
    let (mut call, _) = source.accepted(next).await;
    call.cancel().await;
    call.last().await;
    victim.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_messages_that_mean_little_take_little_memory() {
    let victim = Victim::start("");
    let bad = Bad::new("bad", &victim).await;
    let honest = Bad::new("honest", &victim).await;
    honest.is_answered().await;
    let before = victim.uses();
    // Four million bytes on the wire are a million disks in memory.
    let long = hostile::peer::a_million_disks();
    let mut others = Vec::new();
    for _ in 0..6 {
        others.push(bad.again().await);
    }
    let sends = others.iter().flat_map(|bad| (0..3).map(move |_| bad));
    let sends = sends.map(|bad| bad.raw(&long));
    futures_util::future::join_all(sends).await;
    honest.is_answered().await;
    let after = victim.uses();
    eprintln!("{before:?} {after:?}");
    assert!(
        after.memory_kib < before.memory_kib + (384 << 10),
        "{before:?} {after:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_is_the_sources_alone() {
    let victim = Victim::start("");
    let (good, bad) = (
        Bad::new("good", &victim).await,
        Bad::new("bad", &victim).await,
    );
    let machine = victim.machine(&guest("web-7")).await;
    let ours = offer("web-7", machine.clone());
    // A region called a disk would be written without a request.
    let mut disk = ours.clone();
    disk.regions[0].durable = true;
    assert_eq!(good.refused(disk).await.code, RefusalCode::Invalid);
    let (mut call, token) = good.accepted(ours.clone()).await;
    let journal = victim.journal(ours.migration);
    let of_other = |message: &str, end: End| match end {
        End::Closed(reason) => assert!(reason.contains("no attempt of yours"), "{reason}"),
        other => panic!("{message}: {other:?}"),
    };
    let (migration, attempt) = (ours.migration, ours.attempt);
    for attempt in [attempt, Attempt(2)] {
        of_other(
            "Ask",
            bad.first(&ToDestination::Ask { migration, attempt }).await,
        );
        let epoch = Epoch(2);
        let resume = ToDestination::Resume {
            migration,
            attempt,
            epoch,
        };
        of_other("Resume", bad.first(&resume).await);
    }
    // The same guest, and the same migration with a guest of its own.
    let mut theirs = offer("web-7", machine.clone());
    theirs.migration = MigrationId([9; 8]);
    let refusal = bad.refused(theirs.clone()).await;
    assert_eq!(refusal.code, RefusalCode::Busy, "{refusal:?}");
    theirs.guest.name = "other".to_owned();
    theirs.migration = migration;
    theirs.attempt = Attempt(2);
    let refusal = bad.refused(theirs).await;
    assert!(!refusal.text.contains("web-7"), "{refusal:?}");
    assert_eq!(victim.journal(migration), journal);
    // A token is valid for its own host only.
    assert!(bad.bulk(&ours, &token).await.is_err());
    // The attempt goes on: its own source can still cancel it, and only that ends it.
    call.cancel().await;
    assert!(matches!(call.last().await, ToSource::Aborted { .. }));
    victim.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn room_is_reserved_before_it_is_taken() {
    let victim = Victim::start(
        "[hosts.bad.limits]\narriving = 2\nmemory = \"200MiB\"\nvcpus = 5\nimages = []\n",
    );
    let bad = Bad::new("bad", &victim).await;
    let honest = Bad::new("honest", &victim).await;
    let machine = victim.machine(&guest("a")).await;
    let (mut first, _) = bad.accepted(offer("a", machine.clone())).await;
    let mut second = offer("b", machine.clone());
    second.migration = MigrationId([2; 8]);
    let limit = |refusal: longhaul_protocol::message::Refusal, key: &str| {
        assert!(refusal.hint.as_ref().unwrap().contains(key), "{refusal:?}");
        assert!(refusal.hint.unwrap().contains("[hosts.bad.limits]"));
    };
    let mut large = second.clone();
    large.guest.memory_mib = 160;
    limit(bad.refused(large).await, "`memory`");
    let mut wide = second.clone();
    wide.guest.vcpus = 5;
    limit(bad.refused(wide).await, "`vcpus`");
    let mut disk = second.clone();
    disk.guest.disks = vec![longhaul_protocol::guest::Disk {
        name: "vda".to_owned(),
        image: "secret".to_owned(),
        shared: true,
        read_only: false,
    }];
    limit(bad.refused(disk).await, "`images`");
    let (mut other, _) = bad.accepted(second.clone()).await;
    let mut third = second.clone();
    (third.guest.name, third.migration) = ("c".to_owned(), MigrationId([3; 8]));
    limit(bad.refused(third.clone()).await, "`arriving`");
    // Others have limits of their own, and released resources are available again.
    let (mut theirs, _) = honest.accepted(third.clone()).await;
    for call in [&mut first, &mut other, &mut theirs] {
        call.cancel().await;
        call.last().await;
    }
    victim.is_empty().await;
    third.attempt = Attempt(2);
    third.migration = MigrationId([4; 8]);
    let (mut again, _) = bad.accepted(third).await;
    again.cancel().await;
    again.last().await;
    victim.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_this_host_comes_from_nowhere() {
    let victim = Victim::start("");
    let bad = Bad::new("bad", &victim).await;
    let mut offer = offer("web-7", empty_machine());
    offer.generation = Generation(1000);
    for (holder, expected) in [
        ("\"here\"", "itself has the right"),
        ("{\"in_doubt\": {\"host\": \"x\"}}", "does not know yet"),
    ] {
        victim.set_right("web-7", holder);
        let refusal = bad.refused(offer.clone()).await;
        assert_eq!(refusal.code, RefusalCode::Busy);
        assert!(refusal.text.contains(expected), "{refusal:?}");
    }
    // One that never moved is known by its description.
    victim.knows("db-1");
    let mut own = offer.clone();
    own.guest.name = "db-1".to_owned();
    let refusal = bad.refused(own).await;
    assert_eq!(refusal.code, RefusalCode::Busy);
    assert!(refusal.text.contains("of its own"), "{refusal:?}");
    assert_eq!(victim.uses().journals, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sends_next_to_nothing_is_given_up() {
    let victim = Victim::start("[limits]\nstall = \"3s\"\n");
    let bad = Bad::new("bad", &victim).await;
    let machine = victim.machine(&guest("web-7")).await;
    // Nothing at all but keep-alives.
    let (mut call, _) = bad.accepted(offer("web-7", machine.clone())).await;
    let ToSource::Aborted { reason, .. } = call.last().await else {
        panic!("another end");
    };
    assert!(reason.contains("hardly sends"), "{reason}");
    victim.is_empty().await;
    // Messages without content.
    let mut slow = offer("web-7", machine);
    slow.attempt = Attempt(2);
    let (mut call, _) = bad.accepted(slow).await;
    let complete = ToDestination::Complete {
        epoch: Epoch(77),
        frames: 1,
        early_bytes: 0,
        device_state_bytes: 1,
    };
    let trickle = async {
        while call
            .sender
            .send(&longhaul_protocol::wire::encode(&complete).unwrap())
            .await
            .is_ok()
        {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let gone = victim.is_empty();
    timeout(
        LIMIT,
        futures_util::future::select(Box::pin(trickle), Box::pin(gone)),
    )
    .await
    .unwrap();
    victim.is_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_frame_ends_the_attempt_and_no_more() {
    let victim = Victim::start("");
    let bad = Bad::new("bad", &victim).await;
    let machine = victim.machine(&guest("web-7")).await;
    let before = victim.uses();
    let piece = |index: u32, total: u32| {
        let mut piece = vec![129];
        piece.extend(index.to_le_bytes());
        piece.extend(total.to_le_bytes());
        piece.extend(vec![0; PIECE_BYTES]);
        piece
    };
    let mut cases = vec![
        ("no frame", vec![0xff; 100]),
        ("a device state without end", piece(0, u32::MAX)),
        (
            "a piece behind its end",
            piece(u32::MAX / PIECE_BYTES as u32, 64 << 20),
        ),
        ("a bomb", bomb()),
        ("a frame of a region that is not there", frame(9, 0, 1)),
        ("a frame behind the end of its region", frame(0, 1 << 31, 1)),
        ("a sequence number of 0", frame(0, 0, 0)),
    ];
    for (n, (what, message)) in cases.drain(..).enumerate() {
        let mut offer = offer("web-7", machine.clone());
        offer.migration = MigrationId([10 + n as u8; 8]);
        let (mut call, token) = bad.accepted(offer.clone()).await;
        let bulk = bad.bulk(&offer, &token).await.unwrap();
        bulk.reserve().await.unwrap().send(message.into()).unwrap();
        match timeout(LIMIT, call.last()).await {
            Ok(ToSource::Aborted { reason, .. }) => {
                assert!(reason.contains("breaks the protocol"), "{what}: {reason}");
            }
            other => panic!("{what}: {other:?}"),
        }
        victim.is_empty().await;
    }
    let after = victim.uses();
    assert!(
        after.memory_kib < before.memory_kib + (128 << 10),
        "{before:?} {after:?}"
    );
    assert!(after.files <= before.files + 16, "{before:?} {after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_out_of_order_end_the_attempt_and_no_more() {
    let victim = Victim::start("");
    let bad = Bad::new("bad", &victim).await;
    let machine = victim.machine(&guest("web-7")).await;
    let attempt = Attempt(1);
    let never = [
        (
            "a commit that nobody is ready for",
            vec![
                ToDestination::Commit {
                    attempt,
                    generation: Generation(1),
                },
                ToDestination::Cancel {
                    reason: "\u{1b}[2J".repeat(1000),
                },
            ],
        ),
        (
            "verified before it was loaded",
            vec![
                ToDestination::Verified,
                ToDestination::Commit {
                    attempt,
                    generation: Generation(1),
                },
                ToDestination::Cancel {
                    reason: String::new(),
                },
            ],
        ),
        (
            "a second offer on the channel",
            vec![ToDestination::Offer(Box::new(offer(
                "other",
                machine.clone(),
            )))],
        ),
        (
            "digests of what is not there",
            vec![ToDestination::VerifyRegion {
                region: RegionId(0),
                range: longhaul_protocol::BlockRange::new((1 << 32) - 2, 2),
                blocks_per_digest: 1,
            }],
        ),
        (
            "digests without end",
            vec![ToDestination::VerifyRegion {
                region: RegionId(0),
                range: longhaul_protocol::BlockRange::new(0, 1 << 32),
                blocks_per_digest: 0,
            }],
        ),
        (
            "a prelude that is none",
            vec![ToDestination::Start {
                prelude: vec![0x55; 60_000],
            }],
        ),
    ];
    for (n, (what, messages)) in never.into_iter().enumerate() {
        let mut offer = offer("web-7", machine.clone());
        offer.migration = MigrationId([30 + n as u8; 8]);
        let (mut call, _) = bad.accepted(offer).await;
        for message in messages {
            call.say(&message).await;
        }
        // A QEMU that rejects its prelude may report that late: nothing is sent after it.
        if what.starts_with("a prelude") {
            call.cancel().await;
        }
        let last = timeout(LIMIT, call.last()).await;
        assert!(
            matches!(last, Ok(ToSource::Aborted { .. })),
            "{what}: {last:?}"
        );
        victim.is_empty().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_of_a_parcel_is_reached_by_its_name_and_answers_are_not_piled_up() {
    let folder = tempfile::tempdir().unwrap();
    let wd1 = folder.path().join("wd1");
    std::fs::create_dir(&wd1).unwrap();
    std::fs::write(wd1.join("box-0.parcel"), vec![7; 64 << 20]).unwrap();
    std::fs::write(folder.path().join("secret.parcel"), "secret").unwrap();
    let victim = Victim::start(&format!("[parcel_devices]\nwd1 = {wd1:?}\n"));
    let bad = Bad::new("bad", &victim).await;
    let find = |device: &str, file: Option<&str>| ToTerminal::Find {
        device: device.to_owned(),
        file: file.map(str::to_owned),
        writable: false,
    };
    let first = [
        ToTerminal::Sync,
        find("wd2", None),
        find("", None),
        find("../wd1", None),
    ];
    for message in first {
        let (_, answer) = bad.device(&message).await;
        let is_refused = matches!(answer, FromTerminal::Refused(_));
        assert!(is_refused, "{message:?}: {answer:?}");
    }
    let names = ["../secret.parcel", "/etc/passwd", "a\0.parcel", "."];
    for name in names {
        let (_, answer) = bad.device(&find("wd1", Some(name))).await;
        let unsuitable = FromTerminal::Failed(DeviceFault::Unsuitable);
        assert_eq!(answer, unsuitable, "{name}");
    }
    // Two GiB are asked for in each of some channels, and nothing of it is taken.
    let mut calls = Vec::new();
    for _ in 0..4 {
        let (mut call, answer) = bad.device(&find("wd1", None)).await;
        assert!(matches!(answer, FromTerminal::Opened { .. }), "{answer:?}");
        for number in 0..2048 {
            call.tell(&ToTerminal::Read {
                at: (number % 64) << 20,
                bytes: 1 << 20,
            })
            .await;
        }
        calls.push(call);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let uses = victim.uses();
    assert!(uses.memory_kib < 300 << 10, "{uses:?}");
    drop(calls);
    bad.is_answered().await;
}

/// Returns a frame of one zero block.
fn frame(region: u16, block: u64, seq: u64) -> Vec<u8> {
    let id = BlockId {
        region: RegionId(region),
        block,
    };
    let frame = Encoder::new().encode_frame(
        seq,
        &[id],
        &[[0; BLOCK_SIZE]],
        &[Decision::Zero],
        Compression::Raw,
    );
    frame.unwrap().bytes
}

/// Returns a frame of a block whose payload decompresses to a gigabyte.
fn bomb() -> Vec<u8> {
    let payload = longhaul_codec::pack(&vec![0; 256 << 20]).unwrap();
    let mut frame = vec![FRAME_VERSION, 2, 1, 0];
    frame.extend((BLOCK_SIZE as u32).to_le_bytes());
    frame.extend(1u64.to_le_bytes());
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend([1, 0, 0, 1]);
    frame.extend(payload);
    frame
}
