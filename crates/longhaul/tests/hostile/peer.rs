//! Provides a trusted peer that speaks the protocol itself, and its victim agent.

use crate::common::{Agent, LIMIT, free_address, qemu, qemu_table};
use longhaul_codec::DigestKey;
use longhaul_hypervisor::config::HostConfig;
use longhaul_hypervisor::launch::{Launch, Role};
use longhaul_hypervisor::observe::observe;
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Kernel, Nic};
use longhaul_protocol::hardware::{Hardware, MemoryBackend, PlacedDevice, Topology};
use longhaul_protocol::machine::{Machine, RamBlock};
use longhaul_protocol::message::{Offer, Query, Refusal, ToDestination, ToSource};
use longhaul_protocol::terminal::{FromTerminal, ToTerminal};
use longhaul_protocol::{Attempt, Epoch, Generation, MigrationId, RegionId, RegionSpec, wire};
use longhaul_transport as transport;
use longhaul_transport::{
    BulkBinding, BulkConfig, BulkSender, BulkToken, ChannelReceiver, ChannelSender, Control,
    Endpoint, EndpointConfig, Hello, Identity, Scope, TrustStore, TrustedHost,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

/// Memory of the offered guests: 64 MiB.
const MEMORY_MIB: u64 = 64;

/// An agent under attack.
pub struct Victim {
    agent: Agent,
    address: SocketAddr,
}

/// The resources that an agent uses.
#[derive(Debug)]
pub struct Uses {
    pub memory_kib: u64,
    pub files: usize,
    pub threads: usize,
    pub journals: usize,
    pub guests: usize,
}

impl Victim {
    /// Starts an agent with more tables in its configuration.
    pub fn start(tables: &str) -> Self {
        let address = free_address().parse().unwrap();
        let agent = Agent::start_configured(|folder| {
            format!(
                "name = \"victim\"\nstate = {:?}\nlisten = \"{address}\"\napi.socket = {:?}\n\
                 {}[qemu.emulators]\nqemu = {:?}\n\
                 [images.secret]\npath = \"/nonexistent/secret\"\nformat = \"raw\"\n{tables}",
                folder.join("s"),
                folder.join("agent.sock"),
                qemu_table(),
                qemu(),
            )
        });
        Self { agent, address }
    }

    fn state(&self) -> PathBuf {
        self.agent.folder.path().join("s")
    }

    /// Returns its current resource use (for memory: the peak).
    pub fn uses(&self) -> Uses {
        let proc = format!("/proc/{}", self.agent.child.id());
        let status = std::fs::read_to_string(format!("{proc}/status")).unwrap();
        let value = |name: &str| -> u64 {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        let entries = |path: &Path| std::fs::read_dir(path).map_or(0, Iterator::count);
        Uses {
            memory_kib: value("VmHWM:"),
            files: entries(Path::new(&format!("{proc}/fd"))),
            threads: value("Threads:") as usize,
            // Besides the incarnation of them all.
            journals: entries(&self.state().join("journal")).saturating_sub(1),
            guests: entries(&self.state().join("guests")),
        }
    }

    /// Gives it a stopped guest of its own.
    pub fn knows(&self, guest: &str) {
        let descriptions = self.agent.folder.path().join("s/descriptions");
        std::fs::create_dir_all(&descriptions).unwrap();
        let file = descriptions.join(format!("{guest}.toml"));
        std::fs::write(file, format!("name = {guest:?}\n")).unwrap();
    }

    /// Sets the holder of a guest's right.
    pub fn set_right(&self, guest: &str, holder: &str) {
        let holder = serde_json::from_str(holder).unwrap();
        let right = longhaul_storage::Right {
            guest: guest.to_owned(),
            generation: Generation(7),
            holder,
        };
        let rights = longhaul_storage::Rights::open(&self.state().join("rights")).unwrap();
        rights.set(&right).unwrap();
    }

    pub fn journal(&self, migration: MigrationId) -> Vec<u8> {
        let file = self.state().join(format!("journal/{migration}.journal"));
        std::fs::read(file).unwrap()
    }

    /// Waits until nothing of any guest remains.
    pub async fn is_empty(&self) {
        let deadline = Instant::now() + LIMIT;
        while self.uses().guests > 0 {
            assert!(Instant::now() < deadline, "{}", self.agent.log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns the machine that its QEMU would report for a guest.
    pub async fn machine(&self, guest: &GuestDescription) -> Machine {
        self.machine_with(guest, "").await
    }

    /// Returns the same with these configuration tables.
    pub async fn machine_with(&self, guest: &GuestDescription, tables: &str) -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(
            "state = {:?}\n{}[qemu.emulators]\nqemu = {:?}\n{tables}",
            folder.path(),
            qemu_table(),
            qemu()
        );
        let config: HostConfig = toml::from_str(&config).unwrap();
        let launch = Launch {
            description: guest,
            role: Role::Destination,
            emulator: "qemu",
            accelerator: longhaul_hypervisor::Accelerator::Tcg,
            generation: 0,
            bases: &Default::default(),
            sizes: &Default::default(),
        };
        let (guest, qmp) = launch.run(&config).await.unwrap();
        let machine = observe(&qmp).await.unwrap();
        guest.stop(Some(&qmp)).await.unwrap();
        machine
    }
}

/// The end of an exchange.
#[derive(Debug)]
pub enum End {
    Said(ToSource),
    Closed(String),
}

/// A trusted peer without a regular agent.
pub struct Bad {
    endpoint: Endpoint,
    control: Arc<Mutex<Control>>,
    _folder: Option<tempfile::TempDir>,
}

/// A channel with an accepted offer.
pub struct Call {
    pub sender: ChannelSender,
    receiver: ChannelReceiver,
}

impl Call {
    pub async fn say(&mut self, message: &ToDestination) {
        // The other side may have hung up, which `last` reports.
        let _ = self.sender.send(&wire::encode(message).unwrap()).await;
    }

    /// Sends a message about a device.
    pub async fn tell(&mut self, message: &ToTerminal) {
        // As above.
        let _ = self.sender.send(&wire::encode(message).unwrap()).await;
    }

    pub async fn cancel(&mut self) {
        let reason = "enough".to_owned();
        self.say(&ToDestination::Cancel { reason }).await;
    }

    /// Returns the next message.
    pub async fn next(&mut self) -> ToSource {
        let bytes = timeout(LIMIT, self.receiver.recv()).await.unwrap();
        wire::decode(&bytes.unwrap().expect("nothing more is said")).unwrap()
    }

    /// Returns the end of the attempt, skipping earlier messages.
    pub async fn last(&mut self) -> ToSource {
        loop {
            let message = self.next().await;
            if matches!(
                message,
                ToSource::Aborted { .. } | ToSource::Committed { .. }
            ) {
                // Acknowledges the other side's last message.
                let _ = self.sender.finish().await;
                return message;
            }
        }
    }
}

impl Bad {
    /// Returns a peer that the victim trusts under this name.
    pub async fn new(name: &str, victim: &Victim) -> Self {
        Self::with(
            name,
            victim,
            (wire::VERSION_OLDEST, wire::VERSION),
            "query,send",
        )
        .await
    }

    /// Returns a peer with these versions and permissions.
    pub async fn with(name: &str, victim: &Victim, versions: (u16, u16), may: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(folder.path()).unwrap();
        let trust = TrustStore::open(&folder.path().join(transport::TRUST_FILE)).unwrap();
        let hello = Hello {
            version_min: versions.0,
            version_max: versions.1,
            software: "hostile".to_owned(),
            incarnation: None,
        };
        let config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), hello);
        let output = victim.agent.longhaul(&[
            "host",
            "trust",
            name,
            &identity.host_id().to_string(),
            "127.0.0.1:9",
            "--may",
            may,
        ]);
        assert!(output.status.success(), "{output:?}");
        let shown = victim.agent.longhaul(&["--json", "host"]);
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        let victim = TrustedHost {
            name: "victim".to_owned(),
            id: shown["fingerprint"].as_str().unwrap().parse().unwrap(),
            addresses: vec![victim.address.to_string()],
            scope: Scope::default(),
        };
        trust.add(victim).unwrap();
        let endpoint = Endpoint::bind(config, identity, trust).unwrap();
        let control = endpoint.connect("victim").await.unwrap();
        Self {
            endpoint,
            control: Arc::new(Mutex::new(control)),
            _folder: Some(folder),
        }
    }

    /// Returns another connection of the same peer.
    pub async fn again(&self) -> Self {
        Self {
            endpoint: self.endpoint.clone(),
            control: Arc::new(Mutex::new(self.endpoint.connect("victim").await.unwrap())),
            _folder: None,
        }
    }

    /// Returns a channel, over a new connection if the last was closed.
    async fn channel(&self) -> transport::Channel {
        let mut control = self.control.lock().await;
        if let Ok(channel) = control.open().await {
            return channel;
        }
        // Closed connections count for a moment longer.
        let deadline = Instant::now() + LIMIT;
        *control = loop {
            match self.endpoint.connect("victim").await {
                Ok(control) => break control,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            sleep(Duration::from_millis(100)).await;
        };
        control.open().await.unwrap()
    }

    /// Sends arbitrary bytes, and waits for the result.
    pub async fn raw(&self, bytes: &[u8]) {
        let mut channel = self.channel().await;
        let exchange = async {
            // A closed connection is one of the expected results.
            if channel.send(bytes).await.is_ok() {
                let _ = channel.recv().await;
            }
        };
        timeout(LIMIT, exchange).await.unwrap();
    }

    /// Opens a channel with this message, and returns the first answer.
    pub async fn first(&self, message: &ToDestination) -> End {
        let mut channel = self.channel().await;
        let exchange = async {
            if let Err(error) = channel.send(&wire::encode(message).unwrap()).await {
                return End::Closed(error.to_string());
            }
            match channel.recv().await {
                Ok(Some(bytes)) => End::Said(wire::decode(&bytes).unwrap()),
                Ok(None) => End::Closed("the channel was finished".to_owned()),
                Err(error) => End::Closed(error.to_string()),
            }
        };
        timeout(LIMIT, exchange).await.unwrap()
    }

    /// Opens a channel with this message.
    pub async fn call(&self, first: &ToDestination) -> Call {
        let (sender, receiver) = self.channel().await.split();
        let mut call = Call { sender, receiver };
        call.say(first).await;
        call
    }

    /// Opens a channel about a device with this message, and returns the first answer.
    pub async fn device(&self, first: &ToTerminal) -> (Call, FromTerminal) {
        let mut call = self.call(&ToDestination::ParcelDevice).await;
        call.tell(first).await;
        let bytes = timeout(LIMIT, call.receiver.recv()).await.unwrap();
        let answer = wire::decode(&bytes.unwrap().expect("an answer")).unwrap();
        (call, answer)
    }

    pub async fn query(&self, guest: &GuestDescription, machine: Machine) -> End {
        let guest = guest.clone();
        let query = Query { guest, machine };
        self.first(&ToDestination::Query(Box::new(query))).await
    }

    /// Sends a harmless query, and fails if there is no answer in time.
    pub async fn is_answered(&self) {
        match self.query(&guest("web-7"), empty_machine()).await {
            End::Said(ToSource::Answer(answer)) => assert_eq!(answer.host, "victim"),
            other => panic!("{other:?}"),
        }
    }

    pub async fn refused(&self, offer: Offer) -> Refusal {
        match self.first(&ToDestination::Offer(Box::new(offer))).await {
            End::Said(ToSource::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    }

    /// Gets an offer accepted; an attempt that has just ended may still block it.
    pub async fn accepted(&self, offer: Offer) -> (Call, Vec<u8>) {
        let message = wire::encode(&ToDestination::Offer(Box::new(offer))).unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            let (mut sender, mut receiver) = self.channel().await.split();
            sender.send(&message).await.unwrap();
            match next(&mut receiver).await {
                ToSource::Launching { bulk_token, .. } => match next(&mut receiver).await {
                    ToSource::Accepted { .. } => return (Call { sender, receiver }, bulk_token),
                    other => assert!(Instant::now() < deadline, "{other:?}"),
                },
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns the bulk connection of an offer.
    pub async fn bulk(
        &self,
        offer: &Offer,
        token: &[u8],
    ) -> Result<BulkSender, transport::ConnectError> {
        let binding = BulkBinding {
            attempt: offer.attempt_id(),
            epoch: Epoch(1),
        };
        let token = BulkToken::from_bytes(token.try_into().unwrap());
        let control = self.control.lock().await;
        control
            .connect_bulk(&token, binding, BulkConfig::default())
            .await
    }
}

async fn next(receiver: &mut ChannelReceiver) -> ToSource {
    let answer = timeout(LIMIT, receiver.recv()).await.unwrap().unwrap();
    wire::decode(&answer.unwrap()).unwrap()
}

/// Returns an ordinary guest.
pub fn guest(name: &str) -> GuestDescription {
    GuestDescription {
        name: name.to_owned(),
        machine: "pc-q35-7.2".to_owned(),
        cpu: "qemu64".to_owned(),
        vcpus: 1,
        memory_mib: MEMORY_MIB,
        firmware: None,
        kernel: None,
        disks: Vec::new(),
        nics: Vec::new(),
        channels: Vec::new(),
        hardware: None,
    }
}

/// Returns an empty machine.
pub fn empty_machine() -> Machine {
    Machine {
        qemu: String::new(),
        machine_type: "pc-q35-7.2".to_owned(),
        accelerator: "kvm".to_owned(),
        vcpus: 1,
        ram_blocks: Default::default(),
        devices: Default::default(),
        cpu_properties: Default::default(),
    }
}

pub fn offer(name: &str, machine: Machine) -> Offer {
    Offer {
        migration: MigrationId([1; 8]),
        attempt: Attempt(1),
        generation: Generation(0),
        guest: guest(name),
        machine,
        regions: vec![RegionSpec {
            id: RegionId(0),
            name: "pc.ram".to_owned(),
            blocks: MEMORY_MIB << 8,
            durable: false,
            starts_zero: true,
        }],
        digest_key: DigestKey([5; 32]).0,
        paused: false,
        verify: false,
        patience_ms: u32::MAX,
        early_release: false,
    }
}

/// Returns a message just below the size limit, with minimal disks.
pub fn a_million_disks() -> Vec<u8> {
    let mut guest = guest("web-7");
    let disk = Disk {
        name: String::new(),
        image: String::new(),
        shared: false,
        read_only: false,
    };
    guest.disks = vec![disk; 1_000_000];
    let machine = empty_machine();
    wire::encode(&ToDestination::Query(Box::new(Query { guest, machine }))).unwrap()
}

/// Returns offers that no host should accept.
pub fn absurd() -> Vec<(&'static str, Offer)> {
    let mut list = Vec::new();
    let mut add = |what, change: &dyn Fn(&mut Offer)| {
        let mut offer = offer("web-7", empty_machine());
        change(&mut offer);
        list.push((what, offer));
    };
    for name in [
        "",
        "a/b",
        "../../etc",
        "a\0b",
        "a\nb",
        "\u{1b}[31m",
        "-x",
        "ä",
        ".",
        "..",
    ] {
        add("a name", &|offer| offer.guest.name = name.to_owned());
        add("an image's name", &|offer| {
            offer.guest.disks.push(Disk {
                name: "vda".to_owned(),
                image: name.to_owned(),
                shared: true,
                read_only: false,
            });
        });
        add("a firmware's name", &|offer| {
            offer.guest.firmware = Some(name.to_owned())
        });
        add("a channel's name", &|offer| {
            let name = name.to_owned();
            offer.guest.channels.push(Channel { name });
        });
    }
    add("a long name", &|offer| offer.guest.name = "a".repeat(255));
    add("a command line", &|offer| {
        offer.guest.kernel = Some(Kernel {
            name: "k".to_owned(),
            command_line: "x".repeat(1 << 20),
        });
    });
    add("thousands of disks", &|offer| {
        offer.guest.disks = (0..5000)
            .map(|n| Disk {
                name: format!("vd{n}"),
                image: format!("image-{n}"),
                shared: true,
                read_only: false,
            })
            .collect();
    });
    add("thousands of cards", &|offer| {
        let nic = Nic {
            network: "office".to_owned(),
            mac: "52:54:00:12:34:56".to_owned(),
            port: None,
        };
        offer.guest.nics = vec![nic; 5000];
    });
    add("a million processors", &|offer| {
        offer.guest.vcpus = 1_000_000
    });
    add("terabytes of memory", &|offer| {
        offer.guest.memory_mib = 8 << 20
    });
    add("no memory", &|offer| offer.guest.memory_mib = 0);
    add("all memory", &|offer| offer.guest.memory_mib = u64::MAX);
    add("an unknown machine", &|offer| {
        offer.guest.machine = "pc-q35-99.9".to_owned()
    });
    add("options for a machine", &|offer| {
        offer.guest.machine = "pc-q35-7.2,dumpdtb=/etc/passwd".to_owned();
    });
    add("options for a processor", &|offer| {
        offer.guest.cpu = "qemu64,vendor=x".to_owned()
    });
    add("a generation at the end of all", &|offer| {
        offer.generation = Generation(u64::MAX);
    });
    let hardware = |change: &dyn Fn(&mut Hardware)| {
        let mut hardware = Hardware {
            topology: Topology {
                sockets: 1,
                dies: 1,
                cores: 1,
                threads: 1,
            },
            ..Hardware::default()
        };
        change(&mut hardware);
        Some(hardware)
    };
    add("processors that cannot be counted", &|offer| {
        offer.guest.hardware = hardware(&|it| {
            it.topology = Topology {
                sockets: u32::MAX,
                dies: u32::MAX,
                cores: u32::MAX,
                threads: u32::MAX,
            };
        });
    });
    add("devices without end", &|offer| {
        let device = PlacedDevice {
            model: "virtio-rng-pci".to_owned(),
            ..PlacedDevice::default()
        };
        offer.guest.hardware = hardware(&|it| it.devices = vec![device.clone(); 100_000]);
    });
    for text in ["on,file=/etc/passwd", "a\nb", "/etc/passwd", ""] {
        add("a setting", &|offer| {
            offer.guest.hardware = hardware(&|it| {
                it.settings
                    .insert("machine.usb".to_owned(), text.to_owned());
            });
        });
        add("a property", &|offer| {
            let device = PlacedDevice {
                model: "virtio-net-pci".to_owned(),
                properties: [("romfile".to_owned(), text.to_owned())].into(),
                ..PlacedDevice::default()
            };
            offer.guest.hardware = hardware(&|it| it.devices = vec![device.clone()]);
        });
        add("memory's name", &|offer| {
            offer.guest.hardware = hardware(&|it| {
                it.memory = Some(MemoryBackend {
                    id: text.to_owned(),
                    memfd: false,
                    share: false,
                    huge_page_mib: None,
                });
            });
        });
    }
    add("regions without end", &|offer| {
        let region = offer.regions[0].clone();
        offer.regions = (0..64)
            .map(|n| RegionSpec {
                id: RegionId(n),
                blocks: 1 << 32,
                ..region.clone()
            })
            .collect();
    });
    add("blocks of memory without end", &|offer| {
        let block = RamBlock {
            used_bytes: u64::MAX,
            max_bytes: u64::MAX,
            page_bytes: u64::MAX,
        };
        offer.machine.ram_blocks = (0..64).map(|n| (format!("r{n}"), block.clone())).collect();
    });
    list
}
