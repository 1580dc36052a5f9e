//! Tests the tracking of a guest's writes without a move, also while no agent runs and after the
//! export's server has died.

use crate::stage::{GUEST, LIMIT, Stage};
use longhaul_api::{TrackedWrites, Tracking};
use longhaul_lab::process::wait_until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;

/// The unit of a record, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

impl Stage {
    fn tracked(&self, option: &[&str]) -> TrackedWrites {
        let words = [&["guests", "track-writes", GUEST], option].concat();
        self.product.ask(0, &words).unwrap()
    }

    /// Asserts that every chunk that differs from an older copy of the disks is recorded.
    fn are_recorded(&self, before: &[Vec<u8>]) {
        let now: Vec<Vec<u8>> = (0..before.len())
            .map(|disk| fs::read(self.image_of(0, disk)).unwrap())
            .collect();
        // Read after the images: later writes are recorded too.
        let tracked = self.tracked(&["--show"]);
        assert_eq!(tracked.disks.len(), before.len());
        for ((disk, before), now) in tracked.disks.iter().zip(before).zip(&now) {
            assert_eq!(disk.tracking, Tracking::Ongoing);
            let chunks = before.chunks(CHUNK_BYTES).zip(now.chunks(CHUNK_BYTES));
            let changed = chunks.filter(|(before, now)| before != now).count();
            let changed = (changed * CHUNK_BYTES) as u64;
            assert!(changed > 0 && changed <= disk.changed_bytes, "{disk:?}");
        }
    }
}

#[test]
fn what_a_guest_writes_is_recorded_without_a_move() {
    let kinds = ["raw,none", "qcow2,writeback"];
    let Some(mut stage) = Stage::with("10.0", "400mbit,2ms", &kinds, None) else {
        return;
    };
    let begun = stage.tracked(&[]);
    let names: Vec<&str> = begun.disks.iter().map(|disk| disk.disk.as_str()).collect();
    assert_eq!(names.len(), kinds.len(), "{names:?}");
    let before: Vec<Vec<u8>> = (0..kinds.len())
        .map(|disk| fs::read(stage.image_of(0, disk)).unwrap())
        .collect();
    stage.goes_on();
    stage.are_recorded(&before);
    // While no agent runs, and after the servers have died.
    stage.product.agent_mut(0).unwrap().kill().unwrap();
    for server in stage.fronts("track") {
        kill(Pid::from_raw(server), Signal::SIGKILL).unwrap();
    }
    stage.goes_on();
    let host = stage.lab.host(0).unwrap();
    stage.product.agent_mut(0).unwrap().restart(host).unwrap();
    stage.are_recorded(&before);
    let agent = stage.product.agent(0).unwrap();
    agent
        .run(&["guests", "track-writes", GUEST, "--stop"])
        .unwrap();
    let gone = || stage.fronts("supervise").is_empty();
    assert!(wait_until(LIMIT, gone), "{}", stage.logs());
    assert!(stage.tracked(&["--show"]).disks.is_empty());
    stage.stays();
    // It is no reason against a move, which ends it.
    stage.tracked(&[]);
    let agent = stage.product.agent(0).unwrap();
    let plan = agent.run(&["plan", GUEST, "--to", "paris"]).unwrap();
    assert!(plan.contains("To go:"), "{plan}");
    assert!(plan.contains("are tracked: the move ends that"), "{plan}");
    stage.moves(0, "hybrid");
    assert!(stage.fronts("track").is_empty());
    stage.judge(1);
}
