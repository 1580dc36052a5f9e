//! Domains whose memory follows when they run at the destination.

use crate::stage::{GUEST, LIMIT, Stage};
use longhaul_lab::libvirt::Release;
use longhaul_libvirt::domain::DomainState;

#[test]
fn memory_follows_a_domain_there_and_back() {
    let Some(mut stage) = Stage::build("following", Release::Newest) else {
        return;
    };
    let product = stage.start_agents(&[]);
    stage.start_guest();
    stage.daemons[0].run(&["autostart", GUEST]).unwrap();
    for (from, strategy) in [(0, "postcopy"), (1, "hybrid")] {
        let to = 1 - from;
        let host = &stage.lab.hosts()[to];
        let moving = product.migrate(from, GUEST, host, &["--strategy", strategy]);
        let finished = moving.unwrap().finish(LIMIT).unwrap();
        let logs = product.ends_of_logs();
        assert!(finished.completed(), "{}\n{logs}", finished.why());
        let report = finished.report.as_ref().unwrap();
        assert_eq!(report.strategy.name(), strategy);
        stage.hear(to);
        stage.arena.forget_beats();
        stage.arena.wait_for_beat(LIMIT).unwrap();
        stage.verify();
        let mut expected = [None, None];
        expected[to] = Some(DomainState::Running);
        stage.wait_for(expected);
        let info = stage.daemons[to].run(&["dominfo", GUEST]).unwrap();
        assert!(info.contains("Persistent:     yes"), "{info}");
        assert!(info.contains("Autostart:      enable"), "{info}");
    }
}
