//! Domains as `virt-install` and people write them, with the devices that these give them. Their
//! disks are empty.

use crate::stage::{LIMIT, Stage};
use longhaul_lab::installed;
use longhaul_lab::libvirt::Release;
use longhaul_lab::process::{run, wait_until};
use longhaul_lab::product::Product;
use longhaul_libvirt::domain::DomainState;
use std::fs;
use std::path::Path;
use std::process::Command;

const DOMAINS: [(&str, &str); 8] = [
    ("cloud-init", include_str!("domains/cloud-init.xml")),
    ("debian-default", include_str!("domains/debian-default.xml")),
    ("numa-pinned", include_str!("domains/numa-pinned.xml")),
    ("scsi-discard", include_str!("domains/scsi-discard.xml")),
    ("spice-desktop", include_str!("domains/spice-desktop.xml")),
    ("uefi-q35", include_str!("domains/uefi-q35.xml")),
    ("windows-tpm", include_str!("domains/windows-tpm.xml")),
    (SLOTS, include_str!("domains/slots-queues.xml")),
];
/// As an administrator writes it by hand: slots for memory, more processors than it has at first, a
/// card of several queues.
const SLOTS: &str = "slots-queues";
/// What is plugged in while it runs.
const DIMM: &str = "<memory model='dimm'><target><size unit='MiB'>64</size><node>1</node></target>\
                    </memory>";
/// As OpenStack's Nova writes it: its console has a log.
const OPENSTACK: (&str, &str) = ("instance-0000001f", include_str!("domains/openstack.xml"));
/// The bridges in their XML, and the other host's for the same networks.
const NETWORKS: [[&str; 2]; 2] = [["br0", "br1"], ["wan0", "wan1"]];
const IMAGE_BYTES: u64 = 8 << 20;

/// Returns the paths of a domain's disks, each with its format.
fn disks(xml: &str) -> Vec<(&str, &str)> {
    let of = |part: &str, text: &'static str| {
        let start = part.find(text)? + text.len();
        let length = part.get(start..)?.find('"')?;
        Some((start, start + length))
    };
    let parts = xml.split("<disk ").skip(1);
    let parts = parts.filter_map(|part| part.split("</disk>").next());
    parts
        .filter_map(|part| {
            let (start, end) = of(part, "<source file=\"")?;
            let (from, to) = of(part, "name=\"qemu\" type=\"")?;
            Some((part.get(start..end)?, part.get(from..to)?))
        })
        .collect()
}

fn file_name(path: &str) -> &str {
    Path::new(path).file_name().unwrap().to_str().unwrap()
}

/// Two hosts with daemons and agents that know all of the domains' disks and bridges.
struct People {
    product: Product,
    stage: Stage,
}

impl People {
    fn build() -> Option<Self> {
        let mut stage = Stage::build("people", Release::Installed)?;
        let tables = [0, 1].map(|number| {
            let host = &stage.lab.hosts()[number];
            let mut text = format!("[libvirt]\nsocket = {:?}\n", stage.daemons[number].socket());
            text += "[networks]\n";
            for (name, bridge) in ["first", "second"].into_iter().zip(NETWORKS[number]) {
                let batch = format!("link add {bridge} type bridge\nlink set {bridge} up\n");
                host.namespace().configure(&batch).unwrap();
                text += &format!("{name} = {{ bridge = {bridge:?} }}\n");
            }
            let all = DOMAINS.iter().chain([&OPENSTACK]);
            for (path, format) in all.flat_map(|(_, xml)| disks(xml)) {
                let file = file_name(path);
                // An ISO is the same on both hosts. A disk is where the domain is.
                let is_iso = file.ends_with(".iso");
                let place = host.folder().join(file);
                if is_iso {
                    fs::write(&place, [7; 4096]).unwrap();
                } else if number == 0 {
                    let mut made = Command::new("qemu-img");
                    made.args(["create", "-q", "-f", format]).arg(&place);
                    run(made.arg(IMAGE_BYTES.to_string())).unwrap();
                }
                let name = file.replace('_', "-");
                text += &format!(
                    "[images.{name:?}]\npath = {place:?}\nformat = {format:?}\nlocal = {}\n",
                    !is_iso
                );
            }
            text.parse().unwrap()
        });
        let product = stage.start_agents_with(&tables);
        Some(Self { product, stage })
    }

    /// Starts a domain at the first host.
    fn start(&self, (name, xml): (&str, &str)) {
        let qemu = installed::qemu(self.stage.release.qemu()).unwrap();
        let source = self.stage.lab.hosts()[0].folder();
        let xml = xml.replace("/usr/bin/qemu-system-x86_64", &qemu.display().to_string());
        let xml = xml.replace("/srv/images", &source.display().to_string());
        let xml = xml.replace("/var/lib/libvirt/boot", &source.display().to_string());
        self.stage.daemons[0].start_domain(name, &xml).unwrap();
    }

    /// Plugs in memory, a processor and a card, which its definition does not have.
    fn plug_in(&self, name: &str) {
        let dimm = self.stage.lab.hosts()[0].folder().join("dimm.xml");
        fs::write(&dimm, DIMM).unwrap();
        let daemon = &self.stage.daemons[0];
        let dimm = dimm.display().to_string();
        daemon
            .run(&["attach-device", name, &dimm, "--live"])
            .unwrap();
        daemon.run(&["setvcpus", name, "3", "--live"]).unwrap();
        let bridge = NETWORKS[0][1];
        let card = ["attach-interface", name, "bridge", bridge, "--model"];
        let card = [&card[..], &["virtio", "--live"]].concat();
        daemon.run(&card).unwrap();
    }

    /// Returns whether a domain can move, and what its plan says.
    fn plan(&self, name: &str) -> (bool, String) {
        let mut plan = self.product.agent(0).unwrap().command().unwrap();
        let plan = plan.args(["plan", name, "--to", "paris"]).output().unwrap();
        let said = [plan.stdout, plan.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        (plan.status.success(), said)
    }

    fn moves(&self, name: &str) {
        // The firmware has to place the memory of a display first. Meanwhile it may keep QEMU
        // busy, on emulated processors.
        let mut said = String::new();
        let can_move = wait_until(LIMIT, || {
            let (can_move, plan) = self.plan(name);
            let is_early = ["let the guest boot", "did not answer"];
            let is_early = is_early.iter().any(|words| plan.contains(words));
            assert!(can_move || is_early, "{plan}");
            said = plan;
            can_move
        });
        assert!(can_move, "{name}: {said}");
        let to = &self.stage.lab.hosts()[1];
        let moving = self.product.migrate(0, name, to, &["--verify"]).unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        let logs = || format!("{}\n{}", finished.why(), self.product.ends_of_logs());
        assert!(finished.completed(), "{name}: {}", logs());
        let there = self.stage.connect(1);
        let domain = there.domain(name).unwrap().unwrap();
        assert_eq!(
            there.state(&domain).unwrap(),
            DomainState::Running,
            "{name}"
        );
        assert!(there.is_persistent(&domain).unwrap(), "{name}");
        assert_eq!(self.stage.connect(0).domain(name).unwrap(), None, "{name}");
        there.destroy(&domain).unwrap();
    }
}

/// Half of them each day.
#[test]
fn domains_of_virt_install_move() {
    let Some(people) = People::build() else {
        return;
    };
    for (number, domain) in (0..).zip(DOMAINS) {
        if installed::is_its_day(number % 2, 2) {
            eprintln!("{}", domain.0);
            people.start(domain);
            if domain.0 == SLOTS {
                people.plug_in(SLOTS);
            }
            people.moves(domain.0);
        }
    }
}

/// What keeps a domain here is said by its plan, and nothing of it is said once that is gone.
#[test]
fn logs_and_snapshots_keep_domains_here() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(people) = People::build() else {
        return;
    };
    people.start(OPENSTACK);
    let (can_move, said) = people.plan(OPENSTACK.0);
    assert!(!can_move && said.contains("console.log"), "{said}");
    let domain = DOMAINS[1];
    people.start(domain);
    let daemon = &people.stage.daemons[0];
    daemon
        .run(&["snapshot-create-as", domain.0, "now"])
        .unwrap();
    let (can_move, said) = people.plan(domain.0);
    assert!(!can_move && said.contains("1 snapshots"), "{said}");
    daemon.run(&["snapshot-delete", domain.0, "now"]).unwrap();
    people.moves(domain.0);
}
