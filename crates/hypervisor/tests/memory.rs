//! Tests moves between two real QEMUs on one machine, with a minimal migration loop.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod common;
mod payload;

use common::{MACHINES, does_not_load, emulators, machines};
use longhaul_hypervisor::memory::{Event, Frozen, GuestMemory, Incoming, IncomingError, Outgoing};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_qemu_stream as stream;
use payload::source::{LIMIT, Source, assert_equal};
use payload::{Payload, Qemu, Spec};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a mover waits for a pass before it goes on without one.
const PASS_PATIENCE: Duration = Duration::from_secs(4);

fn emulator(label: &str) -> Option<PathBuf> {
    let found = emulators().into_iter().find(|(known, _)| known == label);
    if found.is_none() {
        println!("QEMU {label} is not here (scripts/install lab): NOT tested with it");
    }
    found.map(|(_, path)| path)
}

/// Moves a guest after `passes` passes, or fewer when it writes too little for another; both QEMUs
/// are stopped and equal in the end.
async fn move_guest(source: &Qemu, to: &Spec, passes: u64) -> (Qemu, Frozen) {
    let mut moving = Source::start(source).await;
    let destination = Qemu::waiting(to).await;
    let memory = destination.memory().await;
    let path = destination.folder.path().join("incoming");
    let incoming = Incoming::start(&destination.qmp, &path, &moving.prelude.bytes).await;
    let incoming = incoming.unwrap();
    loop {
        let held = tokio::time::timeout(PASS_PATIENCE, moving.held()).await;
        moving.pending.send(&moving.memory, &memory);
        if held.is_err() || held.is_ok_and(|pass| pass >= passes) {
            break;
        }
        moving.outgoing.next_pass();
    }
    let frozen = moving.freeze().await.unwrap();
    assert_eq!(source.state().await, "postmigrate");
    moving.pending.send(&moving.memory, &memory);
    let loaded = incoming.finish(&frozen.tail).await.unwrap();
    println!(
        "stop {:?}, read {:?}, finish {:?}, load {:?}, {} B of tail, {} restarts",
        frozen.stop_time,
        frozen.read_time,
        frozen.finish_time,
        loaded.load_time,
        frozen.tail.len(),
        moving.restarts
    );
    assert_equal(&moving.memory, &memory);
    (destination, frozen)
}

async fn runs(qemu: &Qemu, payload: Payload) {
    qemu.qmp.query("cont").await.unwrap();
    assert!(qemu.is_writing(payload).await, "the guest does not run");
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_guests_arrive_byte_by_byte() {
    for (label, path) in emulators() {
        for machine in machines(&label) {
            println!("{label} {machine}");
            let mut spec = Spec::new(&path, machine, Payload::BUSY);
            spec.vcpus = 2;
            let source = Qemu::running(&spec).await;
            let (destination, frozen) = move_guest(&source, &spec, 3).await;
            assert!(frozen.was_running);
            drop(source);
            runs(&destination, spec.payload).await;
            // A second hop shows that nothing was left behind in the first hop's destination.
            let (destination, _) = {
                let again = move_guest(&destination, &spec, 2).await;
                drop(destination);
                again
            };
            runs(&destination, spec.payload).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_guests_stay_in_their_first_pass() {
    for (label, path) in emulators() {
        for machine in machines(&label) {
            println!("{label} {machine}");
            let spec = Spec::new(&path, machine, Payload::IDLE);
            let source = Qemu::running(&spec).await;
            let mut moving = Source::start(&source).await;
            assert_eq!(moving.held().await, 1);
            // The next pass is requested and impossible: nothing is dirty.
            moving.outgoing.next_pass();
            for _ in 0..30 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                assert_eq!(moving.outgoing.try_event(), None);
                assert_eq!(source.state().await, "running");
            }
            let progress = moving.outgoing.progress();
            assert_eq!(progress.pass, 1);
            assert_eq!(progress.dirty.map(|dirty| dirty.pages), Some(0));
            let migration = source.qmp.query("query-migrate").await.unwrap();
            assert_eq!(
                migration["ram"]["dirty-sync-count"],
                json!(1),
                "QEMU does not spin"
            );
            moving.outgoing.abort().await.unwrap();
            assert_eq!(source.state().await, "running");
            let (destination, _) = move_guest(&source, &spec, 1).await;
            destination.qmp.query("cont").await.unwrap();
            assert_eq!(destination.state().await, "running");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_moves_to_a_newer_qemu() {
    for (old, new) in [("7.2", "10.0"), ("7.2", "11.1"), ("10.0", "11.1")] {
        moves_to_a_newer_qemu(old, new).await;
    }
}

async fn moves_to_a_newer_qemu(old: &str, new: &str) {
    let (Some(old), Some(new)) = (emulator(old), emulator(new)) else {
        return;
    };
    if let Some(why) = does_not_load(&old, &new) {
        return println!("not tried: {why}");
    }
    for machine in MACHINES {
        let spec = Spec::new(&old, machine, Payload::BUSY);
        let source = Qemu::running(&spec).await;
        let to = Spec {
            emulator: new.clone(),
            ..spec.clone()
        };
        let (destination, _) = move_guest(&source, &to, 2).await;
        drop(source);
        runs(&destination, spec.payload).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_above_4_gib_arrives() {
    for (label, path) in emulators() {
        println!("{label}");
        let mut spec = Spec::new(&path, machines(&label)[0], Payload::IDLE);
        // From 2816 MiB on a q35 machine has 2 GiB below the hole under 4 GiB, and the rest above.
        spec.memory = "2820M".to_owned();
        let source = Qemu::running(&spec).await;
        // The guest sleeps and has no paging: the test writes above 4 GiB on its behalf.
        let memory = source.memory().await;
        let main = memory.find("pc.ram").unwrap();
        let last = memory.blocks()[main].blocks() - 1;
        let content: Vec<u8> = (0..BLOCK_SIZE).map(|i| i as u8).collect();
        memory
            .write(main, &[BlockRange::new(last, 1)], &content)
            .unwrap();
        let above = format!("xp /1gx {:#x}", (4_u64 << 30) + (772 << 20) - 4096);
        let (destination, _) = move_guest(&source, &spec, 1).await;
        let text = destination.qmp.hmp(&above, LIMIT).await.unwrap();
        assert!(text.contains("0x0706050403020100"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_blocks_arrive_as_well() {
    for (label, path) in emulators() {
        println!("{label}");
        let mut spec = Spec::new(&path, machines(&label)[0], Payload::IDLE);
        spec.more = vec!["-vga".to_owned(), "std".to_owned()];
        let source = Qemu::running(&spec).await;
        let (destination, first) = move_guest(&source, &spec, 1).await;
        destination.qmp.query("cont").await.unwrap();
        let (_, second) = move_guest(&destination, &spec, 1).await;
        let (first, second) = (kept(&first.tail), kept(&second.tail));
        assert!(
            first.len() > 4096,
            "video memory is kept: {} pages",
            first.len()
        );
        assert!(first == second, "kept pages differ");
        let with_content = first.iter().filter(|(_, content)| content.is_some());
        assert!(with_content.count() > 3, "firmware and tables have content");
    }
}

/// Returns a balloon that reports free pages to QEMU.
fn with_balloon(spec: Spec) -> Spec {
    let more = [
        "-object",
        "iothread,id=io",
        "-device",
        "virtio-balloon-pci,free-page-hint=on,iothread=io",
    ];
    Spec {
        more: more.map(str::to_owned).to_vec(),
        ..spec
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_with_a_balloon_that_tells_free_pages_arrive() {
    for (label, path) in emulators() {
        println!("{label}");
        let machine = machines(&label)[0];
        let spec = with_balloon(Spec::new(&path, machine, Payload::BUSY));
        let source = Qemu::running(&spec).await;
        let before = settings(&source).await;
        for point in [Point::Held, Point::SecondPass, Point::Frozen] {
            give_up_at(point, &source, &spec).await;
            assert_eq!(settings(&source).await, before, "{label} {point:?}");
        }
        let (destination, _) = move_guest(&source, &spec, 3).await;
        drop(source);
        runs(&destination, spec.payload).await;

        let idle = with_balloon(Spec::new(&path, machine, Payload::IDLE));
        let source = Qemu::running(&idle).await;
        let (destination, _) = move_guest(&source, &idle, 2).await;
        destination.qmp.query("cont").await.unwrap();
        assert_eq!(destination.state().await, "running");
    }
}

/// QEMU 11.1 queries dirty pages ten times a second and more where post-copy may follow, as
/// Longhaul sets it for such a balloon: those queries are not passes.
#[tokio::test(flavor = "multi_thread")]
async fn looks_in_the_middle_of_a_pass_are_no_passes() {
    let Some(path) = emulator("11.1") else {
        return;
    };
    let payload = Payload {
        filled: (256, 100_000),
        ..Payload::BUSY
    };
    let mut spec = with_balloon(Spec::new(&path, machines("11.1")[0], payload));
    spec.memory = "512M".to_owned();
    let source = Qemu::running(&spec).await;
    let mut moving = Source::start(&source).await;
    for pass in 1..=3 {
        assert_eq!(moving.held().await, pass);
        moving.outgoing.next_pass();
    }
    let migration = source.qmp.query("query-migrate").await.unwrap();
    let looks = migration["ram"]["dirty-sync-count"].as_u64();
    assert!(looks > Some(4), "it does not look more often: {looks:?}");
    assert_eq!(moving.restarts, 0);
    moving.outgoing.abort().await.unwrap();
    assert!(source.is_writing(payload).await, "the guest goes on");
}

/// Returns a kernel of the laboratory that boots and finds no root.
fn booting(emulator: &std::path::Path, machine: &str, console: &std::path::Path) -> Option<Spec> {
    let lab = std::env::var_os("LONGHAUL_LAB_DIR").unwrap_or("/var/lib/longhaul-lab".into());
    let kernel = std::path::Path::new(&lab).join("kernel/vmlinuz");
    if !kernel.exists() {
        println!("no kernel is here (scripts/install lab): NOT tested with one");
        return None;
    }
    let mut spec = Spec::new(emulator, machine, Payload::NONE);
    spec.memory = "192M".to_owned();
    spec.vcpus = 2;
    spec.more = [
        "-kernel",
        kernel.to_str()?,
        "-append",
        "console=ttyS0 panic=0 cryptomgr.notests",
        "-serial",
    ]
    .map(str::to_owned)
    .to_vec();
    spec.more.push(format!("file:{}", console.display()));
    Some(spec)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kernel_moves_while_it_boots() {
    for (label, path) in emulators() {
        for machine in machines(&label) {
            println!("{label} {machine}");
            let folder = tempfile::tempdir().unwrap();
            let console = |hop: u32| folder.path().join(format!("console-{hop}"));
            let Some(spec) = booting(&path, machine, &console(0)) else {
                return;
            };
            let mut qemu = Qemu::running(&spec).await;
            let text = || {
                let texts = (0..=3).map(|hop| std::fs::read(console(hop)).unwrap_or_default());
                let text: Vec<u8> = texts.flatten().collect();
                String::from_utf8_lossy(&text).into_owned()
            };
            let begun = || text().contains("Linux version");
            qemu.wait("the kernel to begin", begun).await;
            for hop in 1..=3 {
                let to = booting(&path, machine, &console(hop)).unwrap();
                let (destination, _) = move_guest(&qemu, &to, 2).await;
                destination.qmp.query("cont").await.unwrap();
                qemu = destination;
            }
            // A kernel that boots to its end has found its memory and its devices unchanged.
            let deadline = Instant::now() + LIMIT;
            while !text().contains("Unable to mount root fs") {
                assert!(Instant::now() < deadline, "not booted: {}", text());
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Returns the kept pages in a tail, by block and page.
fn kept(tail: &[u8]) -> std::collections::BTreeMap<(String, u64), Option<Vec<u8>>> {
    let blocks: Vec<stream::RamBlock> = ["pc.ram", "0000:00:01.0/vga.vram"]
        .into_iter()
        .chain([
            "/rom@etc/acpi/tables",
            "pc.rom",
            "pc.bios",
            "0000:00:01.0/vga.rom",
        ])
        .chain(["/rom@etc/table-loader", "/rom@etc/acpi/rsdp"])
        .map(|name| stream::RamBlock {
            name: name.to_owned(),
            used_bytes: 1 << 30,
        })
        .collect();
    // Any prelude with the same section and blocks serves for reading.
    let section = u32::from_be_bytes(tail[1..5].try_into().unwrap());
    let mut bytes = stream::Writer::prelude("any", section, &blocks);
    bytes.extend(tail);
    let mut parser = stream::Parser::new(stream::Limits::default());
    let mut input = bytes.as_slice();
    let mut pages = std::collections::BTreeMap::new();
    while let Some(event) = parser.next(&mut input).unwrap() {
        match event {
            stream::Event::Prelude(prelude) => {
                (0..prelude.blocks.len()).for_each(|index| parser.keep(index));
            }
            stream::Event::Page {
                block,
                page,
                content,
            } => {
                let content = match content {
                    stream::Content::Kept(content) => Some(content.to_vec()),
                    _ => None,
                };
                pages.insert((blocks[block].name.clone(), page), content);
            }
            _ => {}
        }
    }
    pages
}

/// The point at which a move is aborted.
#[derive(Debug, Clone, Copy)]
enum Point {
    Started,
    Reading,
    Held,
    SecondPass,
    Frozen,
    Loaded,
}

const POINTS: [Point; 6] = [
    Point::Started,
    Point::Reading,
    Point::Held,
    Point::SecondPass,
    Point::Frozen,
    Point::Loaded,
];

async fn settings(qemu: &Qemu) -> (serde_json::Value, serde_json::Value) {
    let capabilities = qemu.qmp.query("query-migrate-capabilities").await.unwrap();
    let parameters = qemu.qmp.query("query-migrate-parameters").await.unwrap();
    (capabilities, parameters)
}

async fn give_up_at(point: Point, source: &Qemu, spec: &Spec) {
    let mut moving = Source::start(source).await;
    let mut loaded = None;
    match point {
        Point::Started => {}
        Point::Reading => drop(moving.event().await),
        Point::Held => drop(moving.held().await),
        Point::SecondPass => {
            let held = moving.held().await;
            moving.outgoing.next_pass();
            while !matches!(moving.event().await, Event::PassStarted { pass } if pass > held) {}
        }
        Point::Frozen => {
            moving.held().await;
            moving.freeze().await.unwrap();
        }
        Point::Loaded => {
            moving.held().await;
            let destination = Qemu::waiting(spec).await;
            let path = destination.folder.path().join("incoming");
            let incoming = Incoming::start(&destination.qmp, &path, &moving.prelude.bytes)
                .await
                .unwrap();
            let frozen = moving.freeze().await.unwrap();
            let memory = destination.memory().await;
            moving.pending.send(&moving.memory, &memory);
            incoming.finish(&frozen.tail).await.unwrap();
            loaded = Some(destination);
        }
    }
    drop(loaded);
    tokio::time::timeout(LIMIT, moving.outgoing.abort())
        .await
        .expect("aborted")
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_is_given_up_anywhere_and_made_again() {
    for (label, path) in emulators() {
        let spec = Spec::new(&path, machines(&label)[0], Payload::BUSY);
        let source = Qemu::running(&spec).await;
        let before = settings(&source).await;
        for point in POINTS {
            println!("{label} {point:?}");
            give_up_at(point, &source, &spec).await;
            assert_eq!(source.state().await, "running", "{label} {point:?}");
            assert!(source.is_writing(spec.payload).await, "{label} {point:?}");
            assert_eq!(settings(&source).await, before, "{label} {point:?}");
        }
        let (destination, _) = move_guest(&source, &spec, 2).await;
        runs(&destination, spec.payload).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_guest_moves_and_stays_paused() {
    for (label, path) in emulators() {
        println!("{label}");
        let spec = Spec::new(&path, machines(&label)[1], Payload::BUSY);
        let source = Qemu::running(&spec).await;
        source.qmp.query("stop").await.unwrap();
        for point in [Point::Held, Point::Frozen] {
            give_up_at(point, &source, &spec).await;
            assert_eq!(source.state().await, "paused", "{label} {point:?}");
        }
        let (destination, frozen) = move_guest(&source, &spec, 1).await;
        assert!(!frozen.was_running);
        assert_eq!(destination.state().await, "paused");
        runs(&destination, spec.payload).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_that_completes_by_itself_is_refused() {
    let Some(path) = emulator("7.2") else {
        return;
    };
    let spec = Spec::new(&path, MACHINES[0], Payload::BUSY);
    let source = Qemu::running(&spec).await;
    let mut moving = Source::start(&source).await;
    moving.held().await;
    let eager = json!({"downtime-limit": 2_000_000});
    let set = source
        .qmp
        .execute("migrate-set-parameters", eager, LIMIT)
        .await;
    set.unwrap();
    moving.outgoing.next_pass();
    while moving.restarts == 0 {
        moving.event().await;
    }
    assert!(source.is_writing(spec.payload).await, "the guest goes on");
    assert_eq!(moving.event().await, Event::PassStarted { pass: 1 });
    moving.held().await;
    let frozen = moving.freeze().await.unwrap();
    assert!(frozen.was_running);
    moving.outgoing.abort().await.unwrap();
    let (destination, _) = move_guest(&source, &spec, 2).await;
    runs(&destination, spec.payload).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_writes_too_fast_is_slowed_where_that_is_asked_for() {
    for (label, path) in emulators() {
        println!("{label}");
        let spec = Spec::new(&path, machines(&label)[0], Payload::BUSY);
        let source = Qemu::running(&spec).await;
        let before = settings(&source).await;
        let memory = Arc::new(source.memory().await);
        let socket = source.folder.path().join("outgoing");
        let started = Outgoing::start(&source.qmp, memory, &socket, Some(40)).await;
        let (outgoing, _) = started.unwrap();
        let slowed = async {
            loop {
                if let Some(percent) = outgoing.progress().slowed_percent {
                    return percent;
                }
                if let Event::Held { .. } = outgoing.next_event().await {
                    outgoing.next_pass();
                }
            }
        };
        let percent = tokio::time::timeout(LIMIT, slowed).await.expect("slowed");
        assert!((20..=40).contains(&percent), "{percent}");
        outgoing.abort().await.unwrap();
        assert_eq!(settings(&source).await, before);
        assert!(source.is_writing(spec.payload).await, "the guest goes on");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_says_why_it_cannot_load() {
    for (label, path) in emulators() {
        println!("{label}");
        let spec = Spec::new(&path, machines(&label)[0], Payload::IDLE);
        let source = Qemu::running(&spec).await;
        let mut moving = Source::start(&source).await;
        moving.held().await;
        let other = Spec {
            more: vec!["-device".to_owned(), "virtio-balloon-pci".to_owned()],
            memory: "32M".to_owned(),
            ..spec.clone()
        };
        let destination = Qemu::waiting(&other).await;
        let path = destination.folder.path().join("incoming");
        let incoming = Incoming::start(&destination.qmp, &path, &moving.prelude.bytes).await;
        let frozen = moving.freeze().await.unwrap();
        let error = match incoming {
            Err(error) => error,
            Ok(incoming) => incoming.finish(&frozen.tail).await.unwrap_err(),
        };
        println!("{error}");
        match label.as_str() {
            "10.0" | "11.1" => assert!(matches!(error, IncomingError::Refused(_)), "{error}"),
            _ => assert!(
                matches!(error, IncomingError::Ended | IncomingError::Socket { .. }),
                "{error}"
            ),
        }
        moving.outgoing.abort().await.unwrap();
        assert_eq!(source.state().await, "running");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_moved_is_refused_by_name() {
    for (label, path) in emulators() {
        println!("{label}");
        let mut spec = Spec::new(&path, machines(&label)[0], Payload::NONE);
        spec.memory = "64M,maxmem=1G".to_owned();
        spec.more = ["-object", "memory-backend-ram,id=vmem,size=128M", "-device"]
            .map(str::to_owned)
            .to_vec();
        spec.more
            .push("virtio-mem-pci,memdev=vmem,requested-size=64M".to_owned());
        let source = Qemu::running(&spec).await;
        let before = settings(&source).await;
        let attached = GuestMemory::attach(&source.qmp, source.pid()).await;
        let error = match attached {
            // QEMU 7.2 does not report the memory of such a device.
            Err(error) => error.to_string(),
            Ok(memory) => {
                let socket = source.folder.path().join("outgoing");
                let started = Outgoing::start(&source.qmp, Arc::new(memory), &socket, None).await;
                started.unwrap_err().to_string()
            }
        };
        println!("{error}");
        assert!(error.contains("mem"), "{error}");
        assert_eq!(source.state().await, "running");
        assert_eq!(settings(&source).await, before);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_dies_is_noticed() {
    for (label, path) in emulators() {
        println!("{label}");
        let spec = Spec::new(&path, machines(&label)[0], Payload::BUSY);
        let mut source = Qemu::running(&spec).await;
        let memory = Arc::new(source.memory().await);
        let socket = source.folder.path().join("outgoing");
        let started = Outgoing::start(&source.qmp, Arc::clone(&memory), &socket, None).await;
        let (outgoing, _) = started.unwrap();
        while !matches!(outgoing.next_event().await, Event::Held { .. }) {}
        source.kill();
        let failed = async { while !matches!(outgoing.next_event().await, Event::Failed(_)) {} };
        tokio::time::timeout(LIMIT, failed).await.expect("noticed");
        let mut page = vec![0; BLOCK_SIZE];
        let main = memory.find("pc.ram").unwrap();
        let error = memory
            .read(main, &[BlockRange::new(300, 1)], &mut page)
            .unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
        assert!(outgoing.abort().await.is_err());
    }
}
