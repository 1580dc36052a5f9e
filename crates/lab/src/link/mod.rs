//! Creates links between emulated hosts, changes them, measures them, and counts their traffic.
//!
//! [`spec`] is the request of a user, [`shape`] the arithmetic on a virtual clock, [`emulator`] the
//! process that carries the frames, and [`measure`] compares the result with the request.

pub mod emulator;
pub mod measure;
pub mod shape;
pub mod spec;
pub mod stats;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use self::emulator::{EmulatorConfig, EndConfig, Reply, Request};
use self::spec::LinkSpec;
use self::stats::LinkStats;
use crate::error::{During, LabError};
use crate::netns::Namespace;
use crate::process::{own_binary, show};
use crate::registry::{Claim, LAB_VARIABLE};

/// The number of frames that an interface queues for an emulator that waits for the processor.
const INTERFACE_QUEUE_FRAMES: u32 = 10_000;

/// A host's end of a link.
#[derive(Debug, Clone, Copy)]
pub struct End<'a> {
    /// The host's name; the other host's interface to it is named `to-NAME`, that of a second link
    /// `to-NAME2`.
    pub name: &'a str,
    /// Which of the links between the same hosts it is, from 1.
    pub link: u8,
    /// The host's number, from 1; its hardware addresses are derived from it.
    pub number: u8,
    /// The host's address.
    pub address: &'a str,
    /// Its network namespace.
    pub namespace: &'a Namespace,
}

/// A link between two hosts. Dropping it removes it.
#[derive(Debug)]
pub struct Link {
    control: Control,
    process: Child,
    /// The emulator lives for as long as this pipe is open.
    _alive: Option<ChildStdin>,
}

/// The controls of a link, which other processes can also use.
#[derive(Debug, Clone)]
pub struct Control {
    socket: PathBuf,
}

impl Link {
    /// Creates a link between two hosts and assigns addresses to its ends.
    ///
    /// # Errors
    /// When the emulator cannot be started (it needs root and /dev/net/tun).
    pub fn create(
        ends: [End<'_>; 2],
        spec: LinkSpec,
        seed: u64,
        lab: &Claim,
    ) -> Result<Self, LabError> {
        let [first, second] = ends;
        let socket = lab.folder().join(match second.link {
            1 => format!("link-{}-{}.sock", first.name, second.name),
            link => format!("link{link}-{}-{}.sock", first.name, second.name),
        });
        let config = EmulatorConfig {
            ends: [(first, second), (second, first)].map(|(end, peer)| EndConfig {
                namespace: end.namespace.name().to_owned(),
                interface: interface_of(peer),
            }),
            spec,
            seed,
            control: socket.clone(),
        };
        let (process, alive) = start_emulator(&config, &lab.record.id)?;
        let link = Self {
            control: Control { socket },
            process,
            _alive: alive,
        };
        configure(first, second)?;
        configure(second, first)?;
        Ok(link)
    }

    /// Returns the controls of this link.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Returns the emulator's process number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // It ends by itself when the pipe closes; this only speeds it up and leaves no zombie.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Control {
    /// Returns the control of the link with this socket.
    pub fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the link's counters.
    ///
    /// # Errors
    /// When its emulator does not answer.
    pub fn stats(&self) -> Result<LinkStats, LabError> {
        match self.ask(&Request::Stats)? {
            Reply::Stats(stats) => Ok(*stats),
            other => Err(self.misunderstood(&format!("{other:?}"))),
        }
    }

    /// Changes the link; frames under way keep their time of arrival.
    ///
    /// # Errors
    /// When its emulator does not answer.
    pub fn change(&self, spec: LinkSpec) -> Result<(), LabError> {
        self.tell(&Request::Change(spec))
    }

    /// Drops every frame for this long, those under way included.
    ///
    /// # Errors
    /// When its emulator does not answer.
    pub fn cut(&self, time: Duration) -> Result<(), LabError> {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 1000);
        self.tell(&Request::CutMs(ms.min(u64::MAX / 1_000_000_000)))
    }

    /// Ends a cut now.
    ///
    /// # Errors
    /// When its emulator does not answer.
    pub fn heal(&self) -> Result<(), LabError> {
        self.tell(&Request::Heal)
    }

    fn tell(&self, request: &Request) -> Result<(), LabError> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(self.misunderstood(&format!("{other:?}"))),
        }
    }

    fn ask(&self, request: &Request) -> Result<Reply, LabError> {
        let line = self
            .exchange(request)
            .during(|| format!("ask the link's emulator at {}", self.socket.display()))?;
        serde_json::from_str(&line).map_err(|error| self.misunderstood(&error.to_string()))
    }

    fn exchange(&self, request: &Request) -> std::io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        Ok(answer)
    }

    fn misunderstood(&self, message: &str) -> LabError {
        LabError::Answer {
            what: format!("the link's emulator at {}", self.socket.display()),
            message: message.to_owned(),
        }
    }
}

/// Returns the name of a host's interface towards a peer.
pub fn interface(peer: &str) -> String {
    format!("to-{peer}")
}

/// Returns the name of the interface towards the end of a link.
fn interface_of(peer: End<'_>) -> String {
    match peer.link {
        1 => interface(peer.name),
        link => format!("{}{link}", interface(peer.name)),
    }
}

fn start_emulator(
    config: &EmulatorConfig,
    lab: &str,
) -> Result<(Child, Option<ChildStdin>), LabError> {
    let text = serde_json::to_string(config).map_err(|error| LabError::Answer {
        what: "the link's configuration".to_owned(),
        message: error.to_string(),
    })?;
    // Without the right to such priority `nice` reports that and goes on; lateness is measured
    // anyway.
    let mut command = Command::new("nice");
    command.args(["-n", "-20"]).arg(own_binary("lab-link")?);
    command.arg(&text).env(LAB_VARIABLE, lab);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let shown = show(&command);
    let mut process = command.spawn().during(|| format!("start `{shown}`"))?;
    let alive = process.stdin.take();
    let mut line = String::new();
    if let Some(stdout) = process.stdout.take() {
        BufReader::new(stdout)
            .read_line(&mut line)
            .during(|| "wait for the link's emulator".to_owned())?;
    }
    if line == "ready\n" {
        return Ok((process, alive));
    }
    let _ = process.wait();
    Err(LabError::Command {
        command: shown,
        message: "the link's emulator ended before the link was up (its reason stands above)"
            .to_owned(),
    })
}

fn configure(end: End<'_>, peer: End<'_>) -> Result<(), LabError> {
    let device = interface_of(peer);
    end.namespace.configure(&format!(
        "link set dev {device} address {own_mac} txqueuelen {INTERFACE_QUEUE_FRAMES} up\n\
         addr add {own}/32 dev {device} peer {other}/32\n\
         neigh replace {other} dev {device} lladdr {peer_mac} nud permanent\n",
        own_mac = hardware_address(end.link, end.number, peer.number),
        peer_mac = hardware_address(end.link, peer.number, end.number),
        own = end.address,
        other = peer.address,
    ))
}

/// Returns the hardware address of one host's interface towards another, all counted from 1.
pub(crate) fn hardware_address(link: u8, own: u8, peer: u8) -> String {
    let link = link.saturating_sub(1);
    format!("02:4c:48:{link:02x}:{own:02x}:{peer:02x}")
}
