//! Gives other hosts the devices that are attached here and named in the configuration.

use crate::channel::{Receiver, Sender, TalkError, short};
use crate::context::Context;
use longhaul_parcel::{CELL_BYTES, Cell, DeviceError, Found, Medium, SharedPlace};
use longhaul_protocol::message::{Refusal, RefusalCode};
use longhaul_protocol::terminal::{DeviceFault, FromTerminal, ToTerminal};
use longhaul_transport::TrustedHost;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};

/// The time limit for the message that opens the device.
const FIRST_MESSAGE: Duration = Duration::from_secs(20);
/// How long a device may be in use before it is refused. A lost connection, which may have been
/// that of the same command, is noticed within this time.
const IN_USE_WITHIN: Duration = Duration::from_secs(20);
const IN_USE_PAUSE: Duration = Duration::from_millis(500);
/// How far behind the end of a file may be written. An interrupted export leaves gaps of at most
/// 128 cells. Some file systems fill a gap with zeros.
const GAP_BYTES_MAX: u64 = 256 << 20;
/// The number of the system's error for a full device.
const ENOSPC: i32 = nix::libc::ENOSPC;

/// Serves a channel about one device, until it ends. `allowed` says whether the peer may have any.
pub(crate) async fn give(
    context: &Context,
    (peer, allowed): (&TrustedHost, Result<(), Refusal>),
    (mut sender, mut receiver): (Sender<FromTerminal>, Receiver<ToTerminal>),
) -> Result<(), TalkError> {
    let first = receiver.recv_within(FIRST_MESSAGE).await?;
    let request = match allowed.and_then(|()| Request::of(context, peer, first)) {
        Ok(request) => request,
        Err(refusal) => return sender.send(&FromTerminal::Refused(refusal)),
    };
    let opened = request.open().await;
    let device = &request.device;
    let mut open = match opened {
        Ok(open) => open,
        Err(error) => {
            tracing::info!(peer = peer.name, device, %error, "a device cannot be opened");
            return sender.send(&FromTerminal::Failed(fault(&error)));
        }
    };
    let is_written = open.is_writable;
    tracing::info!(peer = peer.name, device, is_written, "a device is in use");
    sender.send(&open.opened())?;
    loop {
        let message = match receiver.recv().await {
            Ok(message) => message,
            // The command opens it again.
            Err(TalkError::Closed | TalkError::Channel(_)) => break,
            Err(error) => return Err(error),
        };
        let (answer, ends) = block_in_place(|| open.answer(message));
        if let FromTerminal::Failed(fault) = &answer {
            tracing::warn!(peer = peer.name, device, ?fault, "an operation has failed");
        }
        // No more answers are kept in memory than one.
        sender.send_through(&answer).await?;
        if ends {
            break;
        }
    }
    tracing::info!(peer = peer.name, device, "a device is not in use any more");
    Ok(())
}

/// What is to be opened.
struct Request {
    device: String,
    place: PathBuf,
    how: How,
}

enum How {
    Make(String),
    Find(Option<String>, bool),
}

impl Request {
    /// Checks what a peer wants to open.
    fn of(context: &Context, peer: &TrustedHost, first: ToTerminal) -> Result<Self, Refusal> {
        let (device, how) = match first {
            ToTerminal::Make { device, file } => (device, How::Make(file)),
            ToTerminal::Find {
                device,
                file,
                writable,
            } => (device, How::Find(file, writable)),
            _ => {
                return Err(Refusal {
                    code: RefusalCode::Invalid,
                    text: "a device must be opened first".to_owned(),
                    hint: None,
                });
            }
        };
        let here = &context.parts.config.name;
        let limits = context.allowances.limits(peer);
        let is_listed = |list: &Vec<String>| list.contains(&device);
        if !limits.parcel_devices.as_ref().is_none_or(is_listed) {
            let peer = &peer.name;
            return Err(Refusal {
                code: RefusalCode::NotAllowed,
                text: format!(
                    "{here} does not let {peer} use the device {} (parcel_devices)",
                    short(&device)
                ),
                hint: Some(format!(
                    "add it to `parcel_devices` in {here}'s agent.toml, under [limits] or \
                     [hosts.{peer}.limits]"
                )),
            });
        }
        let Some(place) = context.parts.config.parcel_devices.get(&device) else {
            return Err(Refusal {
                code: RefusalCode::Unsuitable,
                text: format!("{here} has no device {} for parcels", short(&device)),
                hint: Some(format!(
                    "name it in {here}'s agent.toml, under [parcel_devices], and start its agent \
                     again"
                )),
            });
        };
        let place = place.clone();
        Ok(Self { device, place, how })
    }

    /// Opens the device. Waits for another command that writes it.
    async fn open(&self) -> Result<Open, DeviceError> {
        let until = Instant::now() + IN_USE_WITHIN;
        loop {
            match block_in_place(|| self.open_now()) {
                Err(DeviceError::InUse(_)) if Instant::now() < until => sleep(IN_USE_PAUSE).await,
                opened => return opened,
            }
        }
    }

    fn open_now(&self) -> Result<Open, DeviceError> {
        let place = SharedPlace(&self.place);
        let (found, is_writable) = match &self.how {
            How::Make(file) => (place.make(file)?, true),
            How::Find(file, writable) => (place.find(file.as_deref(), *writable)?, *writable),
        };
        Ok(Open::of(found, is_writable))
    }
}

/// An open device.
struct Open {
    path: PathBuf,
    medium: Box<dyn Medium>,
    bytes: u64,
    is_block: bool,
    is_writable: bool,
    /// Memory from which a device is written, and into which it is read, past the page cache.
    memory: Cell,
}

impl Open {
    fn of(found: Found, is_writable: bool) -> Self {
        Self {
            path: found.path,
            medium: found.medium,
            bytes: found.bytes,
            is_block: found.is_block,
            is_writable,
            memory: Cell::new(),
        }
    }

    fn opened(&self) -> FromTerminal {
        let name = self.path.file_name().map(|name| name.to_string_lossy());
        FromTerminal::Opened {
            file: name
                .filter(|_| !self.is_block)
                .map(|name| name.into_owned()),
            bytes: self.bytes,
        }
    }

    /// Does what a message says. Returns the answer, and whether the channel ends with it: what a
    /// device has after a failed write is not known.
    fn answer(&mut self, message: ToTerminal) -> (FromTerminal, bool) {
        let changes = matches!(message, ToTerminal::Write { .. } | ToTerminal::Sync);
        match self.act(message) {
            Ok(answer) => (answer, false),
            Err(error) => (FromTerminal::Failed(io_fault(&error)), changes),
        }
    }

    fn act(&mut self, message: ToTerminal) -> io::Result<FromTerminal> {
        match message {
            ToTerminal::Make { .. } | ToTerminal::Find { .. } => {
                return Err(refused("a device is open already"));
            }
            ToTerminal::QueryLength => {
                let bytes = self.medium.length()?;
                return Ok(FromTerminal::Length { bytes });
            }
            ToTerminal::Read { at, bytes } => return self.read(at, bytes as usize),
            ToTerminal::Write { at, content } => self.write(at, &content)?,
            ToTerminal::Sync => self.medium.sync()?,
            ToTerminal::Forget => self.medium.forget()?,
            ToTerminal::Remove => self.remove()?,
        }
        Ok(FromTerminal::Done)
    }

    fn read(&mut self, at: u64, bytes: usize) -> io::Result<FromTerminal> {
        let memory = self.memory.bytes_mut().get_mut(..bytes);
        let memory = memory.ok_or_else(|| refused("it is too much at once"))?;
        match self.medium.read_at(at, memory) {
            Ok(()) => Ok(FromTerminal::Content {
                content: memory.to_vec(),
            }),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(FromTerminal::End),
            Err(error) => Err(error),
        }
    }

    fn write(&mut self, at: u64, content: &[u8]) -> io::Result<()> {
        if !self.is_writable {
            return Err(refused("it was not opened to be written"));
        }
        let end = at.saturating_add(content.len() as u64);
        match self.is_block {
            true if end > self.bytes => return Err(io::Error::from_raw_os_error(ENOSPC)),
            false if at > self.medium.length()?.saturating_add(GAP_BYTES_MAX) => {
                return Err(refused("it is too far behind the end of the file"));
            }
            _ => {}
        }
        let memory = self.memory.bytes_mut().get_mut(..content.len());
        let memory = memory.ok_or_else(|| refused("it is too much at once"))?;
        memory.copy_from_slice(content);
        self.medium.write_at(at, memory)
    }

    /// Removes the file, if it has no content of worth.
    fn remove(&self) -> io::Result<()> {
        let is_removable = self.is_writable && !self.is_block;
        match is_removable && self.medium.length()? <= CELL_BYTES as u64 {
            true => self.medium.remove(&self.path),
            false => Err(refused("it has content, and is not removed")),
        }
    }
}

fn refused(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Returns what a peer is told of an error: nothing of the paths of this host.
fn io_fault(error: &io::Error) -> DeviceFault {
    DeviceFault::Io {
        errno: error.raw_os_error().and_then(|errno| errno.try_into().ok()),
        text: short(&error.to_string()),
    }
}

fn fault(error: &DeviceError) -> DeviceFault {
    match error {
        DeviceError::Io { error, .. } => io_fault(error),
        DeviceError::NotEmpty(_) => DeviceFault::NotEmpty,
        DeviceError::Unsuitable(_) => DeviceFault::Unsuitable,
        DeviceError::Ambiguous { found, .. } => DeviceFault::Ambiguous {
            found: u32::try_from(*found).unwrap_or(u32::MAX),
        },
        DeviceError::InUse(_) => DeviceFault::InUse,
        DeviceError::Small { .. } | DeviceError::Refused { .. } => {
            io_fault(&io::Error::other("it cannot be used"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn open(place: &Path, how: How) -> Result<Open, DeviceError> {
        let request = Request {
            device: "wd1".to_owned(),
            place: place.to_path_buf(),
            how,
        };
        request.open_now()
    }

    fn write(at: u64, content: &[u8]) -> ToTerminal {
        let content = content.to_vec();
        ToTerminal::Write { at, content }
    }

    #[test]
    fn a_device_is_written_synced_read_and_removed_only_if_it_has_next_to_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut device = open(folder.path(), How::Make("box-0".to_owned())).unwrap();
        let FromTerminal::Opened { file, bytes } = device.opened() else {
            panic!("it is open");
        };
        assert_eq!(file.as_deref(), Some("box-0.parcel"));
        assert!(bytes > 0);
        let done = |(answer, ends): (FromTerminal, bool)| {
            assert_eq!((answer, ends), (FromTerminal::Done, false));
        };
        let cell = vec![7; CELL_BYTES];
        done(device.answer(write(0, &cell)));
        done(device.answer(write(CELL_BYTES as u64, b"abc")));
        done(device.answer(ToTerminal::Sync));
        done(device.answer(ToTerminal::Forget));
        let read = |device: &mut Open, at, bytes| device.answer(ToTerminal::Read { at, bytes }).0;
        let content = |bytes: &[u8]| FromTerminal::Content {
            content: bytes.to_vec(),
        };
        assert_eq!(read(&mut device, 0, 1 << 20), content(&cell));
        let end = CELL_BYTES as u64;
        assert_eq!(read(&mut device, end, 3), content(b"abc"));
        assert_eq!(read(&mut device, end, 4), FromTerminal::End);
        let length = device.answer(ToTerminal::QueryLength).0;
        assert_eq!(length, FromTerminal::Length { bytes: end + 3 });
        let (removed, ends) = device.answer(ToTerminal::Remove);
        assert!(matches!(removed, FromTerminal::Failed(_)) && !ends);
        // Another one cannot be opened to be written meanwhile.
        let again = open(folder.path(), How::Find(None, true)).map(drop);
        assert_eq!(fault(&again.unwrap_err()), DeviceFault::InUse);
        drop(device);
        let file = folder.path().join("box-0.parcel");
        fs::File::options()
            .write(true)
            .open(&file)
            .unwrap()
            .set_len(end)
            .unwrap();
        let name = Some("box-0.parcel".to_owned());
        let mut device = open(folder.path(), How::Find(name, true)).unwrap();
        done(device.answer(ToTerminal::Remove));
        assert!(!file.exists());
    }

    #[test]
    fn what_breaks_the_rules_of_a_device_is_refused_without_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let mut device = open(folder.path(), How::Make("box-0".to_owned())).unwrap();
        let (failed, ends) = device.answer(write(GAP_BYTES_MAX + 1, b"abc"));
        assert!(matches!(failed, FromTerminal::Failed(_)) && ends);
        let (failed, _) = device.answer(ToTerminal::Find {
            device: "wd2".to_owned(),
            file: None,
            writable: true,
        });
        assert!(matches!(failed, FromTerminal::Failed(_)));
        drop(device);
        let mut device = open(folder.path(), How::Find(None, false)).unwrap();
        let (failed, _) = device.answer(write(0, b"abc"));
        let FromTerminal::Failed(DeviceFault::Io { errno: None, text }) = failed else {
            panic!("{failed:?}");
        };
        assert!(text.contains("not opened to be written"), "{text}");
        assert_eq!(fs::metadata(&device.path).unwrap().len(), 0);
        let (failed, _) = device.answer(ToTerminal::Remove);
        assert!(matches!(failed, FromTerminal::Failed(_)) && device.path.exists());
        let absent = open(&folder.path().join("wd2"), How::Find(None, false)).map(drop);
        let absent = fault(&absent.unwrap_err());
        let DeviceFault::Io { errno, text } = absent else {
            panic!("{absent:?}");
        };
        assert_eq!(errno, Some(2));
        assert!(!text.contains("wd2"), "{text}");
    }
}
