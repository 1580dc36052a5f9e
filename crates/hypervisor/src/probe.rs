//! Determines the capabilities of an emulator by starting it without a guest.
//!
//! KVM is tested by running code: on some machines `/dev/kvm` opens, and a guest hangs in it
//! forever.

use crate::capabilities::{Accelerator, Emulator, MachineType};
use crate::hardware::tables::models_of_guests;
use crate::memory::{Incoming, SourceError};
use crate::process::Account;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// The time limit for an emulator to start and answer.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for a guest of a few instructions to run with KVM.
const KVM_TIMEOUT: Duration = Duration::from_secs(5);
/// Exit status of a QEMU whose guest wrote [`EXIT_VALUE`] to the exit device.
const EXIT_STATUS: i32 = (EXIT_VALUE as i32) << 1 | 1;
const EXIT_VALUE: u8 = 0x10;
/// Size of the firmware image; a processor starts at its end.
const FIRMWARE_BYTES: usize = 0x10000;
/// Offset of the first instruction.
const RESET_VECTOR: usize = 0xfff0;

/// Why a program does not work as an emulator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    /// It cannot be started.
    #[error("cannot start the emulator {}: {source}", path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It does not answer.
    #[error("the emulator {} does not answer: {source}", path.display())]
    Qmp {
        /// The program.
        path: PathBuf,
        /// The error.
        source: QmpError,
    },
}

/// Queries an emulator's version, machine types and CPU models.
pub(crate) async fn emulator(
    path: &Path,
    accelerator: Accelerator,
) -> Result<Emulator, ProbeError> {
    let (qmp, mut child) = start(path, accelerator, &[], None).await?;
    let asked = ask(&qmp).await;
    drop(qmp);
    // It has no guest, so it can be killed.
    let ended = child.kill().await;
    let answer = asked.map_err(|source| ProbeError::Qmp {
        path: path.to_owned(),
        source,
    })?;
    ended.map_err(|source| ProbeError::Start {
        path: path.to_owned(),
        source,
    })?;
    Ok(answer)
}

/// Asks an emulator that runs as that user whether its guests can run before all of their memory
/// has arrived.
pub(crate) async fn can_run_early(
    path: &Path,
    account: Option<&Account>,
) -> Result<Result<(), SourceError>, ProbeError> {
    let waiting = ["-incoming", "defer"];
    let (qmp, mut child) = start(path, Accelerator::Tcg, &waiting, account).await?;
    let can = Incoming::can_run_early(&qmp).await;
    drop(qmp);
    child.kill().await.map_err(|source| ProbeError::Start {
        path: path.to_owned(),
        source,
    })?;
    Ok(can)
}

async fn start(
    path: &Path,
    accelerator: Accelerator,
    more: &[&str],
    account: Option<&Account>,
) -> Result<(Qmp, Child), ProbeError> {
    let failed = |source| ProbeError::Start {
        path: path.to_owned(),
        source,
    };
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let theirs = theirs.into_std().map_err(failed)?;
    theirs.set_nonblocking(false).map_err(failed)?;
    let theirs = std::os::fd::OwnedFd::from(theirs);
    let child = short_lived(path, account)
        .args([
            "-machine",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ])
        .args(["-S", "-accel", accelerator.name(), "-qmp", "stdio"])
        .args(more)
        .stdin(theirs.try_clone().map_err(failed)?)
        .stdout(theirs)
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    match Qmp::over(ours, path, START_TIMEOUT).await {
        Ok(qmp) => Ok((qmp, child)),
        Err(source) => Err(ProbeError::Qmp {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Returns a program, run as that user, that ends when this process ends, for any reason.
fn short_lived(path: &Path, account: Option<&Account>) -> Command {
    let mut command = Command::new("setpriv");
    if let Some(Account { uid, gid, .. }) = account {
        command.args([format!("--reuid={uid}"), format!("--regid={gid}")]);
        command.args(["--init-groups", "--inh-caps=-all", "--no-new-privs"]);
    }
    command.args(["--pdeathsig", "KILL", "--"]).arg(path);
    command.kill_on_drop(true);
    command
}

async fn ask(qmp: &Qmp) -> Result<Emulator, QmpError> {
    let machines = list(qmp, "query-machines").await?;
    let models = list(qmp, "query-cpu-definitions").await?;
    let mut absent_models = BTreeSet::new();
    for model in models_of_guests() {
        let question = json!({"typename": model});
        match qmp
            .execute("device-list-properties", question, COMMAND_TIMEOUT)
            .await
        {
            Ok(_) => {}
            Err(QmpError::Refused { .. }) => {
                absent_models.insert(model.to_owned());
            }
            Err(error) => return Err(error),
        }
    }
    let text = |value: &Value, name: &str| value[name].as_str().map(str::to_owned);
    Ok(Emulator {
        version: qmp.version().to_string(),
        machine_types: machines
            .iter()
            .filter_map(|machine| {
                let cpus_max = machine["cpu-max"].as_u64().unwrap_or(u64::MAX);
                Some((text(machine, "name")?, MachineType { cpus_max }))
            })
            .collect(),
        cpu_models: models
            .iter()
            .filter_map(|model| {
                let missing = model["unavailable-features"].as_array();
                let missing = missing.map_or(&[][..], Vec::as_slice);
                let missing = missing.iter().filter_map(Value::as_str);
                Some((text(model, "name")?, missing.map(str::to_owned).collect()))
            })
            .collect(),
        absent_models,
    })
}

async fn list(qmp: &Qmp, command: &str) -> Result<Vec<Value>, QmpError> {
    match qmp.execute(command, json!({}), COMMAND_TIMEOUT).await? {
        Value::Array(values) => Ok(values),
        _ => Err(QmpError::Answer {
            command: command.to_owned(),
            why: "it is no list".to_owned(),
        }),
    }
}

/// Tests whether a guest really runs with KVM; the error gives the reason.
pub(crate) async fn kvm_works(path: &Path, folder: &Path) -> Result<(), String> {
    if let Err(error) = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        return Err(format!("/dev/kvm cannot be opened: {error}"));
    }
    runs_firmware(path, Accelerator::Kvm, folder).await
}

/// Starts a guest that enters 64-bit mode, counts in memory and ends its QEMU by a write to a port.
async fn runs_firmware(path: &Path, accelerator: Accelerator, folder: &Path) -> Result<(), String> {
    let firmware = folder.join(format!("probe-{}.bin", std::process::id()));
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&firmware, image()));
    if let Err(error) = written {
        return Err(format!("{} cannot be written: {error}", firmware.display()));
    }
    let child = short_lived(path, None)
        .args([
            "-machine",
            "q35",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ])
        .args(["-accel", accelerator.name(), "-m", "16", "-bios"])
        .arg(&firmware)
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let outcome = match child {
        Err(error) => Err(format!("{} cannot be started: {error}", path.display())),
        Ok(mut child) => match timeout(KVM_TIMEOUT, child.wait()).await {
            Ok(Ok(status)) if status.code() == Some(EXIT_STATUS) => Ok(()),
            Ok(Ok(status)) => Err(format!("QEMU does not start with it ({status})")),
            Ok(Err(error)) => Err(format!("QEMU cannot be waited for: {error}")),
            Err(_) => {
                // A failure to end it is visible in the process table only.
                let _ = child.kill().await;
                Err("it opens, but a guest does not run in it".to_owned())
            }
        },
    };
    // A file that cannot be removed is overwritten by the next try.
    let _ = std::fs::remove_file(&firmware);
    outcome
}

fn image() -> Vec<u8> {
    let mut image = vec![0; FIRMWARE_BYTES];
    image[..FIRMWARE.len()].copy_from_slice(&FIRMWARE);
    // jmp to the beginning of the image
    let back = (0x10000 - (RESET_VECTOR + 3)) as u16;
    image[RESET_VECTOR] = 0xe9;
    image[RESET_VECTOR + 1..RESET_VECTOR + 3].copy_from_slice(&back.to_le_bytes());
    image
}

/// `probe.S`, assembled.
const FIRMWARE: [u8; FIRMWARE_CODE_BYTES] = *include_bytes!("probe.bin");
const FIRMWARE_CODE_BYTES: usize = 214;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_firmware_runs_where_a_guest_runs() {
        let qemu = Path::new("/usr/bin/qemu-system-x86_64");
        if !qemu.exists() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let ran = runs_firmware(qemu, Accelerator::Tcg, folder.path()).await;
        assert_eq!(ran, Ok(()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn what_is_no_emulator_is_said() {
        let error = emulator(Path::new("/bin/true"), Accelerator::Tcg)
            .await
            .unwrap_err();
        assert!(matches!(error, ProbeError::Qmp { .. }), "{error}");
        let error = emulator(Path::new("/no/qemu"), Accelerator::Tcg)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("/no/qemu"), "{error}");
    }
}
