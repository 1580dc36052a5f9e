//! Two hosts with a daemon each.

use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::guest::disks::LocalDisk;
use longhaul_lab::guest::{CHANNEL_NAME, KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::libvirt::{Around, Libvirt, Release, domain_xml};
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Product, Settings};
use longhaul_libvirt::Connection;
use longhaul_libvirt::domain::DomainState;
use longhaul_libvirt::migration::Flags;
use longhaul_protocol::guest::GuestDescription;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) const LIMIT: Duration = Duration::from_secs(300);
pub(crate) const GUEST: &str = "web";
/// The link between the hosts.
pub(crate) const LINK: &str = "1gbit,1ms";
/// The bridges of the two hosts.
pub(crate) const BRIDGES: [&str; 2] = ["lv-lyon", "lv-paris"];
pub(crate) const FLAGS: Flags = Flags::LIVE.with(Flags::UNSAFE);

/// Two hosts with a daemon each, and a guest at work on the first.
pub(crate) struct Stage {
    pub(crate) daemons: [Libvirt; 2],
    pub(crate) arena: Arena,
    pub(crate) lab: Lab,
    pub(crate) release: Release,
}

impl Stage {
    pub(crate) fn build(purpose: &str, release: Release) -> Option<Self> {
        let there = installed::qemu(release.qemu()).and_then(|_| release.version());
        if let Err(error) = there {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED libvirt: {error}");
            return None;
        }
        let lab = Lab::create(&Plan {
            purpose: format!("test: libvirt, {purpose}"),
            hosts: 2,
            link: LINK.parse().unwrap(),
            seed: 1,
        })
        .unwrap();
        let daemons = [0, 1].map(|host| Libvirt::start(&lab.hosts()[host], release).unwrap());
        Some(Self {
            daemons,
            arena: Arena::new(),
            lab,
            release,
        })
    }

    /// The guest's files on a host.
    pub(crate) fn files(&self, host: usize) -> KernelFiles {
        let folder = self.lab.hosts()[host].folder();
        let mut files = KernelFiles::make_with_history(folder).unwrap();
        // libvirt gives it to its QEMU's account, and counts its users in it. Daemons that tests
        // kill must not share it.
        let kernel = folder.join("vmlinuz");
        if !kernel.exists() {
            fs::copy(&files.kernel, &kernel).unwrap();
        }
        files.kernel = kernel;
        files
    }

    /// Starts an agent on each host.
    pub(crate) fn start_agents(&mut self, disks: &[LocalDisk]) -> Product {
        let tables = [0, 1].map(|host| self.tables(host, disks));
        self.start_agents_with(&tables)
    }

    /// Starts an agent on each host, with this configuration of it.
    pub(crate) fn start_agents_with(&mut self, tables: &[toml::Table; 2]) -> Product {
        let settings = Settings {
            qemus: vec![self.release.qemu().to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let files = self.files(0);
        let each = |host: usize| tables[host].clone();
        let mut product = Product::start_each_with(&mut self.lab, &files, &settings, each).unwrap();
        for (number, host) in self.lab.hosts().iter().enumerate() {
            let agent = product.agent_mut(number).unwrap();
            agent.see_interfaces();
            agent.restart(host).unwrap();
        }
        product
    }

    /// Each host has its own daemon, copy of the guest's files, bridge, and place for disks.
    pub(crate) fn tables(&self, host: usize, disks: &[LocalDisk]) -> toml::Table {
        let files = self.files(host);
        let mut text = format!(
            "[networks]\nlan = {{ bridge = {:?} }}\n[libvirt]\nsocket = {:?}\n\
             [kernels.tiny]\nkernel = {:?}\ninitrd = {:?}\n",
            BRIDGES[host],
            self.daemons[host].socket(),
            files.kernel,
            files.initramfs
        );
        for disk in disks {
            text += &format!(
                "[images.{}]\npath = {:?}\nformat = {:?}\nlocal = true\n",
                disk.image,
                self.at(host, disk),
                disk.kind.format.name()
            );
        }
        text.parse().unwrap()
    }

    /// The place of a disk on a host.
    pub(crate) fn at(&self, host: usize, disk: &LocalDisk) -> PathBuf {
        let name = disk.path.file_name().unwrap();
        self.lab.hosts()[host].folder().join(name)
    }

    /// Starts the guest on the first host.
    pub(crate) fn start_guest(&mut self) {
        let guest = Tiny::calm(GUEST).description();
        self.start_this(&guest, &Around::default());
    }

    /// The domain of a guest on the first host.
    pub(crate) fn xml(&self, guest: &GuestDescription, around: &Around<'_>) -> String {
        let qemu = installed::qemu(self.release.qemu()).unwrap();
        domain_xml(guest, &self.files(0), &qemu, around).unwrap()
    }

    /// Starts this guest on the first host.
    pub(crate) fn start_this(&mut self, guest: &GuestDescription, around: &Around<'_>) {
        let xml = self.xml(guest, around);
        self.daemons[0].start_domain(GUEST, &xml).unwrap();
        self.hear(0);
        self.arena.wait_for_beat(LIMIT).unwrap();
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes: 32 << 20,
            working_set_bytes: 8 << 20,
            pages_per_s: 500,
            write_bytes: 256,
            writers: 1,
            verify_pages_per_s: 0,
            seed: 7,
        };
        self.arena.start(&workload, LIMIT).unwrap();
    }

    /// Lets the guest write nothing to its arena. A QEMU under TCG may lose what is written while
    /// its own migration ends (decision 0002): without agents nobody compares.
    pub(crate) fn calm_guest(&mut self) {
        self.arena.set_rate(0, LIMIT).unwrap();
    }

    /// Listens to the guest on a host.
    pub(crate) fn hear(&mut self, host: usize) {
        let mut socket = None;
        wait_until(LIMIT, || {
            socket = self.daemons[host].channel(GUEST, CHANNEL_NAME);
            socket.is_some()
        });
        self.arena.attach(&socket.unwrap()).unwrap();
    }

    pub(crate) fn connect(&self, host: usize) -> Connection {
        Connection::open(&self.daemons[host].socket()).unwrap()
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.lab.hosts()[0].socket_folder().join(name)
    }

    pub(crate) fn states(&self) -> [Option<DomainState>; 2] {
        [0, 1].map(|host| {
            let connection = self.connect(host);
            let domain = connection.domain(GUEST).unwrap()?;
            match connection.state(&domain) {
                Ok(state) => Some(state),
                // It has gone meanwhile.
                Err(error) if error.is_no_domain() => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    pub(crate) fn wait_for(&self, expected: [Option<DomainState>; 2]) {
        let reached = wait_until(LIMIT, || self.states() == expected);
        assert!(reached, "{:?} is not {expected:?}", self.states());
    }

    /// The guest's memory is as it wrote it.
    pub(crate) fn verify(&mut self) {
        let verified = self.arena.verify(LIMIT).unwrap();
        assert_eq!(
            verified.errors,
            0,
            "{verified:?}, {:?}",
            self.arena.faults()
        );
    }
}
