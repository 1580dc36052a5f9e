//! A QEMU that ends by itself while its guest moves.

use super::{GUEST, ID, LIMIT, Stage, host_of};
use longhaul_api::Phase;
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use longhaul_lab::proxmox::{Version, create_volume};
use std::fs;
use std::process::Command;

impl Stage {
    /// Ends the QEMU of the guest on the first node, as a failure of it would.
    fn kill_guest(&self) {
        let pid = fs::read_to_string(self.nodes[0].channel(ID, "pid")).unwrap();
        let killed = Command::new("kill").args(["-9", pid.trim()]).status();
        assert!(killed.unwrap().success());
        assert!(wait_until(LIMIT, || !self.runs(0, ID)));
    }
}

/// After the attempt its owner starts it again; but not where it has gone to the other host.
#[test]
fn a_guest_whose_qemu_ends_is_unlocked_where_it_stays() {
    if !installed::is_its_day(1, 4) {
        return;
    }
    let Some(mut stage) = Stage::build("ends", Version::Nine) else {
        return;
    };
    let mut product = stage.start_agents(true);
    stage.make_guest("virtio0: local:100/vm-100-disk-0.raw,size=24M\n");
    create_volume(&stage.volume(0, ID, "virtio0"), "raw", 24 << 20).unwrap();
    stage.start_guest();
    let config = stage.config(0, ID);
    for point in [None, Some("source:before-send:complete")] {
        eprintln!("{point:?}");
        if let Some(point) = point {
            let agent = product.agent_mut(0).unwrap();
            let armed = format!("{point}=kill");
            agent.restart_to_fail(host_of(&stage, 0), &armed).unwrap();
        }
        let slowly: &[&str] = match point {
            Some(_) => &[],
            None => &["--bandwidth", "4mbit"],
        };
        let to = host_of(&stage, 1);
        let mut moving = product.migrate(0, GUEST, to, slowly).unwrap();
        match point {
            Some(_) => {
                let died = wait_until(LIMIT, || product.agent_mut(0).unwrap().has_ended());
                assert!(died, "{}", product.ends_of_logs());
                stage.kill_guest();
                let agent = product.agent_mut(0).unwrap();
                agent.restart(host_of(&stage, 0)).unwrap();
            }
            None => {
                let began = moving.wait_for_phase(Phase::Precopy, LIMIT);
                assert!(began, "{}", product.ends_of_logs());
                stage.kill_guest();
            }
        }
        // Where its source has died, nobody reports the end.
        let _ = moving.finish(LIMIT);
        let unlocked = wait_until(LIMIT, || stage.config(0, ID) == config);
        let logs = product.ends_of_logs();
        assert!(unlocked, "{point:?}: {}\n{logs}", stage.config(0, ID));
        let gone = wait_until(LIMIT, || stage.nodes[1].config(ID).is_none());
        assert!(gone && !stage.runs(1, ID), "{point:?}\n{logs}");
        stage.start_guest();
        stage.verify();
    }
    // It is in doubt, and then the other host's.
    for (side, point) in [
        (0, "source:after-record:released"),
        (1, "destination:after-record:committed"),
    ] {
        let agent = product.agent_mut(side).unwrap();
        let armed = format!("{point}=kill");
        agent
            .restart_to_fail(host_of(&stage, side), &armed)
            .unwrap();
    }
    let moving = product.migrate(0, GUEST, host_of(&stage, 1), &[]).unwrap();
    let died = wait_until(LIMIT, || product.agent_mut(0).unwrap().has_ended());
    assert!(died, "{}", product.ends_of_logs());
    stage.kill_guest();
    let agent = product.agent_mut(0).unwrap();
    agent.restart(host_of(&stage, 0)).unwrap();
    let died = wait_until(LIMIT, || product.agent_mut(1).unwrap().has_ended());
    assert!(died, "{}", product.ends_of_logs());
    let _ = moving.finish(LIMIT);
    assert_eq!(stage.lock(0, ID).as_deref(), Some("migrate"));
    let agent = product.agent_mut(1).unwrap();
    agent.restart(host_of(&stage, 1)).unwrap();
    let unlocked = wait_until(LIMIT, || stage.runs(1, ID) && stage.lock(1, ID).is_none());
    assert!(unlocked, "{}", product.ends_of_logs());
    stage.hear(1, ID);
    stage.verify();
    assert_eq!(stage.lock(0, ID).as_deref(), Some("migrate"));
    assert!(stage.qm(0, &["start", "100"]).is_err());
}
