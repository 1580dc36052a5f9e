//! Starts a line's QEMU with open descriptors, as managers of guests do.

use crate::line::fill;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::process;
use longhaul_lab::tap;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The order to start a QEMU: what `lab-exec` reads.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    /// The program.
    pub program: PathBuf,
    /// Its words, with placeholders.
    pub argv: Vec<String>,
    /// The values of placeholders.
    pub values: BTreeMap<String, String>,
    /// Descriptors to open; each placeholder becomes the descriptor's number.
    pub open: BTreeMap<String, Descriptor>,
}

/// A file that QEMU inherits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Descriptor {
    /// A TAP on a bridge.
    Tap {
        /// The interface.
        interface: String,
        /// The bridge.
        bridge: String,
    },
    /// A unix socket that listens.
    Listener(PathBuf),
    /// A file that is appended to.
    Log(PathBuf),
}

impl Descriptor {
    fn open(&self) -> Result<OwnedFd, LabError> {
        let opening = |path: &Path| format!("open {}", path.display());
        Ok(match self {
            Self::Tap { interface, bridge } => {
                let tap = tap::open(interface, libc::IFF_VNET_HDR)?;
                let words = ["link", "set", interface, "master", bridge, "up"];
                process::run(Command::new("ip").args(words))?;
                tap.into()
            }
            Self::Listener(path) => UnixListener::bind(path).during(|| opening(path))?.into(),
            Self::Log(path) => {
                let mut options = File::options();
                options.create(true).append(true);
                options.open(path).during(|| opening(path))?.into()
            }
        })
    }
}

/// Opens the descriptors of an order and becomes its QEMU; returns only with an error.
pub fn become_qemu(order: &Path) -> LabError {
    try_become(order).err().unwrap_or(LabError::Interrupted)
}

fn try_become(path: &Path) -> Result<(), LabError> {
    let text = fs::read(path).during(|| format!("read {}", path.display()))?;
    let order: Order = serde_json::from_slice(&text).map_err(|error| LabError::Answer {
        what: path.display().to_string(),
        message: error.to_string(),
    })?;
    let mut values = order.values;
    // They live until QEMU takes the place of this process.
    let mut held = Vec::new();
    for (key, descriptor) in &order.open {
        let file = descriptor.open()?;
        fcntl(&file, FcntlArg::F_SETFD(FdFlag::empty())).during(|| format!("pass {key} on"))?;
        values.insert(key.clone(), file.as_raw_fd().to_string());
        held.push(file);
    }
    let argv = order.argv.iter().map(|word| fill(word, &values));
    let error = Command::new(&order.program).args(argv).exec();
    drop(held);
    Err(error).during(|| format!("start {}", order.program.display()))
}
