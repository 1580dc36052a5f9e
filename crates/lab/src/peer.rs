//! The peer that Longhaul is compared with: QEMU's own pre-copy of the same guest over the same
//! link, as an administrator would run it.

pub(crate) mod qmp;

use crate::error::{During, LabError};
use crate::guest::KernelFiles;
use crate::interrupt;
use crate::lab::Host;
use crate::netns::command;
use longhaul_protocol::guest::GuestDescription;
use qmp::Qmp;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const PORT: u16 = 4444;
const POLL_EVERY: Duration = Duration::from_millis(10);
/// QEMU's own cleaning up after a move or a cancelled one.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// One of QEMU's ways to move a guest's memory before it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerSystem {
    /// As it is when nothing is asked for.
    Default,
    /// Changes of pages that were sent before, with a cache as large as the guest.
    Xbzrle,
    /// Several connections, each compressed.
    MultifdZstd,
}

impl PeerSystem {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Default, Self::Xbzrle, Self::MultifdZstd];

    /// Its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "qemu-default",
            Self::Xbzrle => "qemu-xbzrle",
            Self::MultifdZstd => "qemu-multifd-zstd",
        }
    }

    fn capabilities(self) -> Value {
        let names: &[&str] = match self {
            Self::Default => &[],
            Self::Xbzrle => &["xbzrle"],
            Self::MultifdZstd => &["multifd"],
        };
        let list: Vec<Value> = names
            .iter()
            .map(|name| json!({"capability": name, "state": true}))
            .collect();
        json!({ "capabilities": list })
    }

    fn parameters(self, memory_bytes: u64) -> Value {
        match self {
            Self::Default => json!({}),
            Self::Xbzrle => json!({"xbzrle-cache-size": memory_bytes.next_power_of_two()}),
            Self::MultifdZstd => {
                json!({"multifd-channels": 4, "multifd-compression": "zstd", "multifd-zstd-level": 1})
            }
        }
    }
}

/// What a host gives a peer's QEMU.
#[derive(Debug)]
pub struct PeerHost<'a> {
    /// The host.
    pub host: &'a Host,
    /// The QEMU to run.
    pub qemu: &'a Path,
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
}

/// A QEMU that the laboratory started itself; it ends with this value.
#[derive(Debug)]
pub struct PeerQemu {
    child: Child,
    qmp: Qmp,
    channel: PathBuf,
    memory_bytes: u64,
}

impl PeerQemu {
    /// Starts the guest, or with `incoming` a QEMU that waits for it.
    ///
    /// # Errors
    /// When QEMU does not start; its own words are in `peer-qemu.log` in the host's folder.
    pub fn start(
        host: &PeerHost<'_>,
        guest: &GuestDescription,
        files: &KernelFiles,
        incoming: bool,
    ) -> Result<Self, LabError> {
        let socket = |what| {
            host.host
                .socket_folder()
                .join(format!("{}-{what}", host.host.name()))
        };
        let (qmp, channel) = (socket("peer-qmp"), socket("peer-arena"));
        for old in [&qmp, &channel] {
            match fs::remove_file(old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).during(|| format!("remove {}", old.display()));
                }
                _ => {}
            }
        }
        let log = host.host.folder().join("peer-qemu.log");
        let log = File::create(&log).during(|| format!("create {}", log.display()))?;
        let mut command = command_line(host, guest, files, &qmp, &channel);
        if incoming {
            command.args(["-incoming", "defer"]);
        }
        command.stdout(Stdio::null()).stderr(log);
        let mut child = host.host.spawn(&mut command)?;
        match Qmp::connect(&qmp) {
            Ok(qmp) => Ok(Self {
                child,
                qmp,
                channel,
                memory_bytes: guest.memory_mib << 20,
            }),
            Err(error) => {
                end(&mut child);
                Err(error)
            }
        }
    }

    /// The socket of the guest's channel.
    pub fn channel(&self) -> &Path {
        &self.channel
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn prepare(&mut self, system: PeerSystem) -> Result<(), LabError> {
        self.qmp
            .execute("migrate-set-capabilities", &system.capabilities())?;
        let parameters = system.parameters(self.memory_bytes);
        self.qmp
            .execute("migrate-set-parameters", &parameters)
            .map(drop)
    }

    fn is_running(&mut self) -> Result<bool, LabError> {
        let status = self.qmp.execute("query-status", &json!({}))?;
        Ok(status.get("status").and_then(Value::as_str) == Some("running"))
    }
}

impl Drop for PeerQemu {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    // It may have ended by itself; either way it is reaped.
    let _ = child.kill();
    let _ = child.wait();
}

/// How a peer's move is run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerMove<'a> {
    /// The way.
    pub system: PeerSystem,
    /// The destination's address on the link.
    pub destination: &'a str,
    /// The downtime asked for.
    pub downtime_ms: u64,
    /// When it is given up.
    pub limit: Duration,
}

/// How a peer's move went.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerResult {
    /// When it was asked for.
    pub began: Instant,
    /// When the guest ran at the destination, or the move was given up.
    pub ended: Instant,
    /// Why it did not complete, where it did not.
    pub failure: Option<String>,
    /// Bytes of memory sent, as QEMU counts them.
    pub memory_bytes: Option<u64>,
    /// Passes over memory, as QEMU counts them.
    pub passes: Option<u64>,
}

impl PeerMove<'_> {
    /// Moves the guest of `source` to `destination`, which was started to wait for it.
    ///
    /// # Errors
    /// When a QEMU refuses or dies; a move that does not end in time is a result.
    pub fn run(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
    ) -> Result<PeerResult, LabError> {
        source.prepare(self.system)?;
        destination.prepare(self.system)?;
        // max-bandwidth 0: as fast as the link takes it.
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": self.downtime_ms});
        source.qmp.execute("migrate-set-parameters", &parameters)?;
        let listen = json!({"uri": format!("tcp:0.0.0.0:{PORT}")});
        destination.qmp.execute("migrate-incoming", &listen)?;

        let began = Instant::now();
        let target = json!({"uri": format!("tcp:{}:{PORT}", self.destination)});
        source.qmp.execute("migrate", &target)?;
        let failure = self.wait(source, destination, began)?;
        let ended = Instant::now();
        let info = source.qmp.execute("query-migrate", &json!({}))?;
        let ram = |key: &str| info.get("ram")?.get(key)?.as_u64();
        Ok(PeerResult {
            began,
            ended,
            failure,
            memory_bytes: ram("transferred"),
            passes: ram("dirty-sync-count"),
        })
    }

    /// Until the guest runs at the destination; what went wrong otherwise.
    fn wait(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
        began: Instant,
    ) -> Result<Option<String>, LabError> {
        loop {
            match migration_status(source)?.as_str() {
                "completed" if destination.is_running()? => return Ok(None),
                "failed" => return Ok(Some("QEMU failed to migrate".to_owned())),
                _ => {}
            }
            if began.elapsed() > self.limit {
                cancel(source)?;
                let seconds = self.limit.as_secs();
                return Ok(Some(format!("it had not converged after {seconds} s")));
            }
            interrupt::sleep(POLL_EVERY)?;
        }
    }
}

fn migration_status(qemu: &mut PeerQemu) -> Result<String, LabError> {
    let info = qemu.qmp.execute("query-migrate", &json!({}))?;
    Ok(info
        .get("status")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned())
}

fn cancel(source: &mut PeerQemu) -> Result<(), LabError> {
    source.qmp.execute("migrate_cancel", &json!({}))?;
    let began = Instant::now();
    while began.elapsed() < SETTLE_LIMIT {
        if ["cancelled", "completed", "failed"].contains(&migration_status(source)?.as_str()) {
            return Ok(());
        }
        thread::sleep(POLL_EVERY);
    }
    Err(LabError::Answer {
        what: "QEMU".to_owned(),
        message: "a cancelled migration did not end".to_owned(),
    })
}

/// The guest as its description says, without what only an agent needs.
fn command_line(
    host: &PeerHost<'_>,
    guest: &GuestDescription,
    files: &KernelFiles,
    qmp: &Path,
    channel: &Path,
) -> Command {
    let mut line = command(host.qemu);
    line.args([
        "-name",
        &guest.name,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ])
    .args([
        "-machine",
        &guest.machine,
        "-accel",
        host.accelerator,
        "-cpu",
        &guest.cpu,
    ])
    .args([
        "-smp",
        &format!("cpus={0},sockets=1,cores={0},threads=1", guest.vcpus),
    ])
    .args(["-m", &format!("size={}M", guest.memory_mib)])
    .arg("-qmp")
    .arg(format!("unix:{},server=on,wait=off", qmp.display()))
    .arg("-kernel")
    .arg(&files.kernel)
    .arg("-initrd")
    .arg(&files.initramfs)
    .args(["-device", "virtio-serial-pci,id=serial,addr=0x3"]);
    if let Some(kernel) = &guest.kernel {
        line.args(["-append", &kernel.command_line]);
    }
    for (number, port) in guest.channels.iter().enumerate() {
        line.arg("-chardev")
            .arg(format!(
                "socket,id=channel{number},path={},server=on,wait=off",
                channel.display()
            ))
            .arg("-device")
            .arg(format!(
                "virtserialport,bus=serial.0,nr={},chardev=channel{number},name={}",
                number + 1,
                port.name
            ));
    }
    line
}
