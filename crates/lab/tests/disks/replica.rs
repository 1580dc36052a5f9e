//! Tests replicas: a guest goes on at another host from the last version of its disks, and comes
//! back live.

use crate::stage::{GUEST, LIMIT, Stage};
use longhaul_api::{GuestState, ReplicaVersion, Replicas, Replications};
use longhaul_lab::process::wait_until;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

impl Stage {
    fn name_of(&self, host: usize) -> String {
        self.lab.host(host).unwrap().name().to_owned()
    }

    fn replicates(&self, from: usize) {
        let to = self.name_of(1 - from);
        let words = [
            "replicate",
            GUEST,
            "--to",
            &to,
            "--every",
            "10s",
            "--keep",
            "3",
        ];
        let begun: Value = self.product.ask(from, &words).unwrap();
        assert_eq!(begun["to"], to, "{begun}");
    }

    fn replication(&self, host: usize) -> longhaul_api::Replication {
        let mut all: Replications = self.product.ask(host, &["replicate"]).unwrap();
        all.replications.remove(0)
    }

    /// Asks for a version that has everything that was written before, and waits for it.
    fn waits_for_version(&self, from: usize) -> ReplicaVersion {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let mut last = None;
        let mut asked = SystemTime::UNIX_EPOCH;
        let arrived = wait_until(LIMIT, || {
            // Each question begins a version at once.
            if asked
                .elapsed()
                .is_ok_and(|since| since > Duration::from_secs(1))
            {
                self.replicates(from);
                asked = SystemTime::now();
            }
            last = self.replication(from).last;
            // Its time has whole seconds.
            last.is_some_and(|last| last.unix_ms > now.as_millis() as u64)
        });
        assert!(arrived, "{:?}\n{}", self.replication(from), self.logs());
        last.unwrap()
    }

    fn replicas(&self, host: usize) -> Replicas {
        self.product.ask(host, &["replicas"]).unwrap()
    }

    /// Restores a version, and compares it with the images of the other host.
    fn is_restored(&self, host: usize, version: u64, into: &Path) {
        let config = self.lab.host(host).unwrap().folder().join("agent.toml");
        let words = [
            "replicas",
            "--config",
            &config.display().to_string(),
            "restore",
            GUEST,
            "--version",
            &version.to_string(),
            "--into",
            &into.display().to_string(),
        ];
        let restored: Value = self.product.ask(host, &words).unwrap();
        for (at, path) in restored["disks"].as_array().unwrap().iter().enumerate() {
            let found = fs::read(path.as_str().unwrap()).unwrap();
            let image = fs::read(self.image_of(1 - host, at)).unwrap();
            let differs = found
                .iter()
                .zip(&image)
                .position(|(one, other)| one != other);
            assert_eq!((differs, found.len()), (None, image.len()), "disk {at}");
        }
        fs::remove_dir_all(into).unwrap();
    }

    fn refused(&self, host: usize, words: &[&str]) -> String {
        let said = self.product.agent(host).unwrap().run(words);
        said.unwrap_err().to_string()
    }

    fn writes(&self, host: usize, disk: &str, words: &str) {
        let said = self.io_of_disk(host, disk, words);
        assert!(said.contains("wrote 65536/65536"), "{said}");
    }
}

const FAILOVER: [&str; 7] = [
    "failover",
    GUEST,
    "--other-side",
    "dead",
    "--because",
    "a test",
    "--yes",
];

#[test]
fn a_guest_goes_on_from_its_replica_and_comes_back_live() {
    let kinds = ["raw,none", "qcow2,writeback"];
    let Some(mut stage) = Stage::with_idle("10.0", "100mbit,4ms", &kinds) else {
        return;
    };
    let into = stage.lab.host(0).unwrap().folder().join("into");
    stage.waits_for_version(0);
    // Whatever ends in the middle of a version, the next one lacks nothing.
    for host in [0, 1] {
        stage.goes_on();
        let at = stage.lab.host(host).unwrap();
        stage.product.agent_mut(host).unwrap().restart(at).unwrap();
        stage.waits_for_version(0);
    }
    stage.goes_on();
    stage.history.stop().unwrap();
    let quiet = stage.waits_for_version(0);
    stage.is_restored(1, quiet.version, &into);
    // Nothing is written any more, and nothing is sent.
    stage.waits_for_version(0);
    let idle = stage.replication(0);
    assert!(idle.sent_bytes < 4096, "{idle:?}");
    stage.writes(0, "vda", "write -P 0x5a 5M 64k");
    let last = stage.waits_for_version(0);
    let after = stage.replication(0);
    assert!(after.sent_bytes < 16 << 10, "{after:?}");
    stage.is_restored(1, last.version, &into);

    // One that is stopped and begun again is compared, and its versions stay.
    let stop = ["replicate", GUEST, "--stop"];
    stage.product.agent(0).unwrap().run(&stop).unwrap();
    let again = stage.waits_for_version(0);
    assert!(stage.replication(0).sent_bytes < 600 << 10, "{again:?}");
    assert_eq!(stage.replicas(1).replicas[0].versions.len(), 3);
    // No two copies: not while its host answers, and not by mistake.
    let refused = stage.refused(1, &FAILOVER);
    assert!(refused.contains("is not dead"), "{refused}");
    let refused = stage.refused(1, &["guests", "start", GUEST]);
    assert!(
        refused.contains(&stage.name_of(0)) || refused.contains("no guest"),
        "{refused}"
    );
    // It is still replicated afterwards.
    stage.waits_for_version(0);

    stage.lose(0);
    let kept = stage.replicas(1).replicas.remove(0);
    assert!(
        kept.versions.len() >= 3 && kept.trouble.is_none(),
        "{kept:?}"
    );
    let failed_over: Value = stage.product.ask(1, &FAILOVER).unwrap();
    assert_eq!(
        failed_over["started"],
        true,
        "{failed_over}\n{}",
        stage.logs()
    );
    assert!(failed_over["version"]["version"].as_u64() >= Some(last.version));
    for disk in 0..stage.disks.len() {
        assert!(stage.image_of(1, disk).exists());
    }
    assert!(stage.replicas(1).replicas.is_empty());
    stage.writes(1, "vdb", "write -P 0x5b 7M 64k");

    // Its host is back: it learns that the guest has left, and keeps its images for the way back.
    stage.find(0);
    let refused = stage.refused(0, &["guests", "start", GUEST]);
    assert!(refused.contains(&stage.name_of(1)), "{refused}");
    let aside = wait_until(LIMIT, || {
        (0..stage.disks.len()).all(|disk| stage.set_aside(0, disk).exists())
    });
    assert!(aside, "{}", stage.logs());
    let back = stage.waits_for_version(1);
    let sent = stage.replication(1);
    assert!(sent.sent_bytes < 8 << 20, "{sent:?}");
    stage.is_restored(0, back.version, &into);
    let to = stage.lab.host(0).unwrap();
    let moving = stage.product.migrate(1, GUEST, to, &["--verify"]).unwrap();
    let finished = stage.ended(moving);
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    let report = *finished.report.unwrap();
    assert!(
        report.bytes.kept_bytes.is_some_and(|kept| kept > 1 << 20),
        "{report:?}"
    );
    let guest = stage.product.guest(0, GUEST).unwrap().unwrap();
    assert_eq!(guest.state, GuestState::Running);
    // It leaves again, over the images of the replica there, which begins anew.
    stage.writes(0, "vda", "write -P 0x5d 3M 64k");
    let to = stage.lab.host(1).unwrap();
    let moving = stage.product.migrate(0, GUEST, to, &["--verify"]).unwrap();
    let finished = stage.ended(moving);
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    let again = stage.waits_for_version(1);
    stage.is_restored(0, again.version, &into);
}
