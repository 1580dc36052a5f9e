//! What is left of a disk when its guest runs at the destination, and trouble while it comes.

use crate::stage::{GUEST, LIMIT, Stage};
use longhaul_api::Phase;
use longhaul_lab::process::wait_until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::Duration;

/// What is left of a disk comes whatever is cut and dies meanwhile, on both hosts, and the guest loses
/// nothing.
#[test]
fn what_is_left_of_a_disk_comes_whatever_dies_meanwhile() {
    let Some(mut stage) = Stage::new("10.0", "20mbit,2ms") else {
        return;
    };
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "postcopy"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        stage.logs()
    );
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    for part in ["arrive", "supervise", "arrive"] {
        // One that was taken over is being started again.
        let one = wait_until(LIMIT, || stage.fronts_of(1, part).len() == 1);
        assert!(one, "{part}\n{}", stage.logs());
        let killed = stage.fronts_of(1, part);
        kill(Pid::from_raw(killed[0]), Signal::SIGKILL).unwrap();
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
    let host = stage.lab.host(0).unwrap();
    let agent = stage.product.agent_mut(0).unwrap();
    agent.kill().unwrap();
    // It may have lost its agent, or not.
    let _ = moving.finish(LIMIT);
    stage.product.agent_mut(0).unwrap().restart(host).unwrap();
    stage.lab.link(0, 1).unwrap().heal().unwrap();
    let gone = wait_until(LIMIT, || !stage.image(0).exists());
    assert!(gone, "{}", stage.logs());
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.goes_on();
    stage.judge(1);
}

/// Once the link is back, a guest that was stalled goes on by itself, and its agents finish the move.
#[test]
fn a_cut_while_something_is_left_is_a_pause() {
    let Some(stage) = Stage::new("7.2", "20mbit,2ms") else {
        return;
    };
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "hybrid"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        stage.logs()
    );
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    link.heal().unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    stage.goes_on();
    stage.nothing_is_left(0);
    stage.nothing_is_left(1);
    stage.judge(1);
}
