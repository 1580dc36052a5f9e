//! Tests missing blocks of a disk when its guest runs at the destination, and failures while they
//! arrive.

use crate::stage::{Failing, GUEST, LIMIT, Stage};
use longhaul_api::{Phase, Progress, RegionProgress, Report};
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::Move;
use longhaul_storage::front::arriving::masks::Masks;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

const BLOCK: u64 = 4096;
/// The offset of a corrupted block.
const WRONG: u64 = 0x20000;

/// Missing blocks of a disk arrive in spite of cuts and deaths, on both hosts, and the guest loses
/// nothing.
#[test]
fn what_is_left_of_a_disk_comes_whatever_dies_meanwhile() {
    let Some(mut stage) = Stage::new("10.0", "20mbit,2ms") else {
        return;
    };
    let moving = cut_with_something_left(&stage);
    for part in ["arrive", "supervise", "arrive"] {
        // A process that was taken over is being restarted.
        let mut killed = Vec::new();
        let one = wait_until(LIMIT, || {
            killed = stage.fronts_of(1, part);
            let is_killed = |pid: &i32| kill(Pid::from_raw(*pid), Signal::SIGKILL).is_ok();
            killed.len() == 1 && killed.iter().all(is_killed)
        });
        assert!(one, "{part}\n{}", stage.logs());
        let next = || {
            let now = stage.fronts_of(1, part);
            part == "supervise" || now.len() == 1 && now != killed
        };
        assert!(wait_until(LIMIT, next), "{part}\n{}", stage.logs());
        if part == "supervise" {
            // The next agent starts the next one.
            let host = stage.lab.host(1).unwrap();
            let agent = stage.product.agent_mut(1).unwrap();
            agent.kill().unwrap();
            agent.restart(host).unwrap();
            assert!(wait_until(LIMIT, || stage.fronts_of(1, part).len() == 1));
        }
    }
    assert!(
        stage.image(0).exists(),
        "nothing was left: {}",
        stage.logs()
    );
    // A restarted agent knows it as well, and how long the source has been away.
    let silent = || {
        stage
            .said(1)
            .is_some_and(|said| said.link.interrupted_ms >= Some(1000))
    };
    assert!(wait_until(LIMIT, silent), "{:?}", stage.said(1));
    let shown = stage
        .product
        .agent(1)
        .unwrap()
        .run(&["migrations"])
        .unwrap();
    for words in [
        "(postcopy) are yet to come from lyon",
        "nothing heard from lyon",
    ] {
        assert!(shown.contains(words), "{shown}");
    }
    is_lost_and_found(stage, moving);
}

/// The source is lost with all its state. The guest waits for missing blocks and for nothing else,
/// can be ended, and its image records them. When the source is found again, they arrive.
fn is_lost_and_found(mut stage: Stage, moving: Move) {
    stage.lose(0);
    // It has lost its agent.
    let _ = moving.finish(LIMIT);
    stage.lab.link(0, 1).unwrap().heal().unwrap();
    let stalls = wait_until(LIMIT, || stands_still(&stage));
    assert!(stalls, "{}", stage.logs());
    let masks = |name: &str| {
        let own = stage.state(1).join(format!("fronts/{GUEST}.0/own"));
        Masks::read(&own.join(name)).unwrap().unwrap()
    };
    let noted = masks("noted");
    let here = (0..noted.blocks).find(|block| !noted.is_missing(*block));
    // QEMU may delay an answer until the next one (docs/decisions/0030): so another answer is
    // provoked.
    let words = format!("read {} 4k", here.unwrap() * BLOCK);
    let said = stage.io_of_disk(1, "vda", &words);
    assert!(said.contains("read 4096/4096"), "{said}");

    // QEMU would wait for pending requests before it quits.
    stage.kill_qemu(1);
    let is_stored = || masks("masks").missing == masks("noted").missing;
    assert!(wait_until(LIMIT, is_stored), "{}", stage.logs());
    let stored = masks("masks");
    assert!(stored.missing_blocks() > 0);
    let image = fs::read(stage.image(1)).unwrap();
    for (block, content) in (0..).zip(image.chunks(BLOCK as usize)) {
        let is_zero = content.iter().all(|byte| *byte == 0);
        assert!(is_zero || !stored.is_missing(block), "block {block}");
    }

    // This host loses power, too; and first another image takes the place.
    stage.lose(1);
    stage.find(1);
    let kept = stage.image(0).with_extension("kept");
    fs::rename(stage.image(0), &kept).unwrap();
    fs::write(stage.image(0), vec![0; 1 << 20]).unwrap();
    stage.find(0);
    let refused = |because: &str| {
        let trouble = stage.said(0).and_then(|said| said.trouble);
        trouble.is_some_and(|why| why.contains(because))
    };
    let by_length = || refused("it has another length");
    assert!(wait_until(LIMIT, by_length), "{}", stage.logs());
    fs::remove_file(stage.image(0)).unwrap();
    fs::copy(&kept, stage.image(0)).unwrap();
    let by_inode = || refused("it is another file");
    assert!(wait_until(LIMIT, by_inode), "{}", stage.logs());
    fs::rename(&kept, stage.image(0)).unwrap();
    let gone = wait_until(LIMIT, || !stage.image(0).exists());
    assert!(gone, "{:?}\n{}", stage.said(1), stage.logs());
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.judge_ended(1, false);
}

/// After the link is repaired, a stalled guest continues by itself, and its agents finish the move.
#[test]
fn a_cut_while_something_is_left_is_a_pause() {
    let Some(stage) = Stage::new("7.2", "20mbit,2ms") else {
        return;
    };
    let moving = cut_with_something_left(&stage);
    // It accesses missing blocks with all its requests. Blocks that were on their way at the cut
    // still arrive, and a slow guest may only seem to stall.
    let waits = || sum(stage.said(1), |disk| disk.waiting.unwrap_or(0)) > 0;
    let stalls = || waits() && stands_still(&stage) && waits();
    assert!(wait_until(LIMIT, stalls), "{}", stage.logs());
    let left = left(stage.said(1));
    assert!(left > 0 && stage.image(0).exists());
    for (host, words, said) in [
        (
            1,
            &["guests", "stop", "--force", GUEST][..],
            "still being fetched",
        ),
        (1, &["cancel", GUEST], "cannot be cancelled"),
        (0, &["cancel", GUEST], "cannot be cancelled"),
    ] {
        let refused = stage.product.agent(host).unwrap().run(words);
        let refused = refused.unwrap_err().to_string();
        let refused = refused.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(refused.contains(said), "{words:?}: {refused}");
    }
    stage.lab.link(0, 1).unwrap().heal().unwrap();
    let finished = stage.ended(moving);
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    let verified = finished.report.unwrap().verify.unwrap();
    assert_eq!((verified.disks, verified.different_blocks), (1, 0));
    stage.goes_on();
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.judge(1);
}

/// Missing blocks wait for space at the destination, and for a source that can read its disk;
/// corrupted ones are detected. The guest gets the same results as from these disks, and loses
/// nothing.
#[test]
fn what_is_left_comes_when_there_is_room_and_can_be_read() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::failing("10.0", "20mbit,2ms", "100m") else {
        return;
    };
    let failing = stage.failing.take().unwrap();
    failing.break_end();
    does_not_leave(&stage);
    let moving = cut_with_something_left(&stage);
    let filling = stage.folders[1].join("filling");
    // As much as there is room for.
    fs::write(&filling, vec![1; 200 << 20]).unwrap_err();
    stage.lab.link(0, 1).unwrap().heal().unwrap();
    let full = || trouble(&stage).contains("No space left");
    assert!(wait_until(LIMIT, full), "{}", stage.logs());
    assert!(stage.image(0).exists() && left(stage.said(1)) > 0);
    fs::remove_file(&filling).unwrap();
    goes_on_after_a_full_disk(&stage);

    // All other blocks arrive. Access to an unreadable one fails, and its place is reported.
    let broken = (Failing::BYTES - Failing::FROM) as u64 / BLOCK;
    let rest = || left(stage.said(1)) == broken;
    assert!(
        wait_until(LIMIT, rest),
        "{:?}\n{}",
        stage.said(1),
        stage.logs()
    );
    let place = Failing::FROM as u64;
    let told = || {
        let disks = stage.said(1).map(|said| said.regions).unwrap_or_default();
        disks.iter().any(|disk| disk.unreadable_byte == Some(place))
    };
    assert!(
        wait_until(LIMIT, told),
        "{:?}\n{}",
        stage.said(1),
        stage.logs()
    );
    let shown = stage
        .product
        .agent(1)
        .unwrap()
        .run(&["migrations"])
        .unwrap();
    assert!(
        shown.contains("cannot read its disk vdb at byte"),
        "{shown}"
    );
    assert_eq!(trouble(&stage), "");
    let said = stage.io_of_guest(1, &format!("read {place} 512"));
    assert!(said.contains("read failed: Input/output error"), "{said}");
    // Blocks that the guest overwrites need not be read.
    let said = stage.io_of_guest(1, &format!("write -P 7 {place} 32k"));
    assert!(said.contains("wrote 32768/32768"), "{said}");
    let rest = || left(stage.said(1)) == broken - 8;
    assert!(wait_until(LIMIT, rest), "{:?}", stage.said(1));
    stage.goes_on();
    assert!(stage.image(0).exists());
    let arrived = stage.folders[1].join("disk1.raw");
    let arriving = File::options().write(true).open(&arrived).unwrap();
    arriving.write_all_at(b"wrong", WRONG + 77).unwrap();

    // The next agent tries again.
    failing.mend();
    let host = stage.lab.host(0).unwrap();
    let agent = stage.product.agent_mut(0).unwrap();
    agent.kill().unwrap();
    // It has lost its agent.
    let _ = moving.finish(LIMIT);
    agent.restart(host).unwrap();
    came_wrong(&stage);
    let gone = wait_until(LIMIT, || !stage.image(0).exists());
    assert!(gone, "{:?}\n{}", stage.said(1), stage.logs());
    let report: Report = stage.product.ask(0, &["report"]).unwrap();
    let verified = report.verify.unwrap();
    assert_eq!((verified.disks, verified.different_blocks), (2, 1));
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.goes_on();
    let mut expected = failing.content.clone();
    expected[Failing::FROM..][..32 << 10].fill(7);
    expected[WRONG as usize..][..BLOCK as usize].fill(8);
    assert!(
        fs::read(arrived).unwrap() == expected,
        "the disk that failed is another one"
    );
    stage.judge(1);
}

/// A guest with a disk that is partly unreadable is not moved by strategies that send all of it
/// before.
fn does_not_leave(stage: &Stage) {
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "mirror"];
    let moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    let failed = stage.ended(moving);
    let place = format!("at byte {}", Failing::FROM);
    assert!(failed.why().contains(&place), "{}", failed.why());
    stage.stays();
}

/// All blocks have arrived, and one is corrupted: the source is kept until the guest has
/// overwritten it.
fn came_wrong(stage: &Stage) {
    let wrong = || {
        let trouble = stage.said(0).and_then(|said| said.trouble);
        trouble.unwrap_or_default()
    };
    // Another trouble may be told before and after it, such as that of a busy connection.
    let is_it = |said: &str| {
        said.starts_with("1 block is not there as here, the first of disk vdb")
            && said.contains(&format!("offset {WRONG:#x}"))
    };
    let found = wait_until(LIMIT, || is_it(&wrong()));
    assert!(found, "{:?}\n{}", stage.said(0), stage.logs());
    let shown = stage.product.agent(0).unwrap().run(&["migrations"]);
    assert!(shown.unwrap().contains("the images here stay"));
    assert!(stage.image(0).exists() && left(stage.said(1)) == 0);
    let said = stage.io_of_guest(1, &format!("write -P 8 {WRONG} 4k"));
    assert!(said.contains("wrote 4096/4096"), "{said}");
}

/// Waits until the guest has been handed over with missing blocks, and cuts the link.
fn cut_with_something_left(stage: &Stage) -> Move {
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "postcopy", "--verify"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    let handed_over = moving.wait_for_phase(Phase::Finishing, LIMIT);
    assert!(handed_over, "{}", stage.logs());
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    moving
}

fn sum(said: Option<Progress>, of: impl Fn(&RegionProgress) -> u64) -> u64 {
    let regions = said.map(|said| said.regions).unwrap_or_default();
    regions.iter().filter(|region| region.disk).map(of).sum()
}

/// Returns the number of missing blocks.
fn left(said: Option<Progress>) -> u64 {
    sum(said, |disk| disk.blocks_pending)
}

/// Returns why they cannot be stored.
fn trouble(stage: &Stage) -> String {
    let said = stage.said(1).and_then(|said| said.trouble);
    said.unwrap_or_default()
}

/// Returns whether the guest completes no operation for a while.
fn stands_still(stage: &Stage) -> bool {
    let done = || stage.history.heard().told.done;
    let before = done();
    thread::sleep(Duration::from_millis(500));
    done() == before
}

/// QEMU stops a guest whose write finds no space, until space is freed and QEMU is ordered to
/// continue.
fn goes_on_after_a_full_disk(stage: &Stage) {
    let done = stage.history.heard().told.done;
    let goes_on = || {
        let mut monitor = stage.monitor(1);
        if monitor.ask("query-status")["status"] == "io-error" {
            monitor.ask("cont");
        }
        stage.history.heard().told.done >= done + 30
    };
    assert!(wait_until(LIMIT, goes_on), "{}", stage.logs());
}
