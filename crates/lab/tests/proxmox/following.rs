//! Guests whose memory follows when they run at the destination.

use super::{DISK_BYTES, GUEST, ID, LIMIT, Stage};
use longhaul_api::Phase;
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use longhaul_lab::proxmox::{Version, create_volume};
use serde_json::json;

/// The link until the guest is stopped, and while its memory follows: so slow that most of it is
/// missing at each trouble.
const LINKS: [&str; 2] = ["100mbit,4ms", "1mbit,4ms"];

/// The guest runs, locked, while its memory follows. Either agent may die meanwhile.
#[test]
fn memory_follows_a_guest_in_spite_of_deaths() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::build("following", Version::Nine) else {
        return;
    };
    let mut product = stage.start_agents(true);
    stage.make_guest("virtio0: local:100/vm-100-disk-0.raw,size=24M\n");
    create_volume(&stage.volume(0, ID, "virtio0"), "raw", DISK_BYTES).unwrap();
    stage.start_guest();
    let words = ["--strategy", "postcopy"];
    for (from, dies) in [(0, 1), (1, 0), (0, 0)] {
        let to = 1 - from;
        let change = |stage: &Stage, link: &str| {
            let link = link.parse().unwrap();
            stage.lab.link(0, 1).unwrap().change(link).unwrap();
        };
        change(&stage, LINKS[0]);
        let moving = product.migrate(from, GUEST, &stage.lab.hosts()[to], &words);
        let mut moving = moving.unwrap();
        let follows = moving.wait_for_phase(Phase::Finishing, LIMIT);
        assert!(follows, "{}", moving.so_far().why());
        change(&stage, LINKS[1]);
        let locks = || [from, to].map(|host| stage.lock(host, ID));
        let locked = Some("migrate".to_owned());
        assert_eq!(locks(), [locked.clone(), locked.clone()]);
        let agent = product.agent_mut(dies).unwrap();
        agent.kill().unwrap();
        agent.restart(&stage.lab.hosts()[dies]).unwrap();
        assert!(stage.runs(from, ID), "all of it had come");
        // Proxmox VE reaches QEMU's monitor meanwhile.
        let status = stage.ask((to, ID), &json!({"execute": "query-status"}));
        assert_eq!(status["running"], json!(true), "{status}");
        change(&stage, LINKS[0]);
        let settled = wait_until(LIMIT, || {
            let runs = [from, to].map(|host| stage.runs(host, ID));
            runs == [false, true] && locks() == [locked.clone(), None]
        });
        assert!(settled, "{:?}\n{}", locks(), product.ends_of_logs());
        stage.hear(to, ID);
        stage.verify();
    }
}
