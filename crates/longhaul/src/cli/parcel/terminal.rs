//! Devices that are attached to another host, a terminal: `HOST:NAME`.
//!
//! The terminal's configuration gives the device its name. A file in a folder there is
//! `HOST:NAME/FILE`. The agent of this host opens a channel for each device that is open.

use longhaul_api::{Client, ClientError, DeviceReader, DeviceStream, DeviceWriter};
use longhaul_parcel::{DeviceError, Found, LocalMedia, Media, Medium};
use longhaul_protocol::limits::PARCEL_TRANSFER_BYTES_MAX;
use longhaul_protocol::terminal::{DeviceFault, FromTerminal, ToTerminal};
use longhaul_protocol::wire;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::block_in_place;
use tokio::time::timeout;

/// The time limit for the answer of a terminal: its disk may be slow, or a device in use for 20 s.
const ANSWER_WAIT: Duration = Duration::from_secs(180);
/// Writes whose answers may be outstanding: the next one travels while one is written.
const WRITES_AHEAD: u32 = 4;

/// A device at a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Name {
    host: String,
    device: String,
    file: Option<String>,
}

impl Name {
    /// Returns the device at a terminal that a path names, if it does. The path of a local device
    /// is absolute, or has a `/` before its first colon.
    fn of(path: &Path) -> Option<Self> {
        let (host, rest) = path.to_str()?.split_once(':')?;
        let (device, file) = match rest.split_once('/') {
            Some((device, file)) => (device, Some(file)),
            None => (rest, None),
        };
        let is_name = |text: &str| {
            let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !text.is_empty() && !text.starts_with('.') && text.chars().all(is_of_name)
        };
        let is_one = is_name(host) && is_name(device) && file.is_none_or(is_name);
        is_one.then(|| Self {
            host: host.to_owned(),
            device: device.to_owned(),
            file: file.map(str::to_owned),
        })
    }

    /// Returns the path of the device, or of a file in it.
    fn path(&self, file: Option<&str>) -> PathBuf {
        let device = format!("{}:{}", self.host, self.device);
        PathBuf::from(match file {
            Some(file) => format!("{device}/{file}"),
            None => device,
        })
    }
}

/// Returns the path of a device as a job keeps it.
pub(super) fn absolute(device: &Path) -> io::Result<PathBuf> {
    match Name::of(device) {
        Some(_) => Ok(device.to_path_buf()),
        None => std::path::absolute(device),
    }
}

/// The devices of this machine, and those at terminals.
pub(super) struct Terminals {
    client: Client,
    handle: Handle,
    /// Why hosts were not reached, and what to do about it. They are not tried again for each
    /// device.
    unreachable: Mutex<HashMap<String, (String, Option<String>)>>,
}

impl fmt::Debug for Terminals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Terminals")
    }
}

impl Terminals {
    /// Reaches terminals by an agent. It is called in a runtime with several threads.
    pub(super) fn by(client: &Client) -> Arc<dyn Media> {
        Arc::new(Self {
            client: client.clone(),
            handle: Handle::current(),
            unreachable: Mutex::default(),
        })
    }

    /// Opens a device.
    fn open(&self, name: &Name, first: &ToTerminal) -> Result<Found, DeviceError> {
        let refused = |text: String, hint: Option<String>| DeviceError::Refused {
            path: name.path(name.file.as_deref()),
            text,
            hint,
        };
        let hosts = || {
            self.unreachable
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let known = hosts().get(&name.host).cloned();
        if let Some((text, hint)) = known {
            return Err(refused(text, hint));
        }
        let open = self.client.parcel_device(&name.host);
        let stream = wait(&self.handle, open).map_err(|error| {
            let (text, hint) = (error.to_string(), hint_of(&name.host, &error));
            hosts().insert(name.host.clone(), (text.clone(), hint.clone()));
            refused(text, hint)
        })?;
        let remote = Remote::of(stream, self.handle.clone());
        let fails = |error| DeviceError::Io {
            path: name.path(name.file.as_deref()),
            error,
        };
        match remote.ask(first).map_err(fails)? {
            FromTerminal::Opened { file, bytes } => {
                let is_one = |file: &String| {
                    let path = name.path(Some(file));
                    Name::of(&path).is_some()
                };
                if !file.as_ref().is_none_or(is_one) {
                    return Err(fails(unfit()));
                }
                Ok(Found {
                    path: name.path(file.as_deref()),
                    is_block: file.is_none(),
                    bytes,
                    medium: Box::new(remote),
                })
            }
            FromTerminal::Refused(refusal) => Err(refused(short(&refusal.text), refusal.hint)),
            FromTerminal::Failed(fault) => Err(device_error(name, first, fault)),
            _ => Err(fails(unfit())),
        }
    }
}

impl Media for Terminals {
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError> {
        match Name::of(at) {
            None => LocalMedia.make(at, name),
            Some(device) => {
                let first = ToTerminal::Make {
                    device: device.device.clone(),
                    file: name.to_owned(),
                };
                self.open(&device, &first)
            }
        }
    }

    fn find(&self, at: &Path, writable: bool) -> Result<Found, DeviceError> {
        match Name::of(at) {
            None => LocalMedia.find(at, writable),
            Some(device) => {
                let first = ToTerminal::Find {
                    device: device.device.clone(),
                    file: device.file.clone(),
                    writable,
                };
                self.open(&device, &first)
            }
        }
    }

    fn place(&self, at: &Path) -> io::Result<PathBuf> {
        match Name::of(at) {
            None => LocalMedia.place(at),
            Some(_) => Ok(at.to_path_buf()),
        }
    }
}

/// Returns what to do when a host is not reached.
fn hint_of(host: &str, error: &ClientError) -> Option<String> {
    match error {
        ClientError::Api(_) => error.hint(),
        _ => {
            let why = format!("this host's agent reaches {host}");
            Some(
                error
                    .hint()
                    .map_or(why.clone(), |hint| format!("{why}: {hint}")),
            )
        }
    }
}

fn device_error(name: &Name, first: &ToTerminal, fault: DeviceFault) -> DeviceError {
    let path = name.path(name.file.as_deref());
    match fault {
        DeviceFault::Io { errno, text } => DeviceError::Io {
            error: io_error(errno, &text),
            path,
        },
        DeviceFault::NotEmpty => DeviceError::NotEmpty(match first {
            ToTerminal::Make { file, .. } => name.path(Some(&format!("{file}.parcel"))),
            _ => path,
        }),
        DeviceFault::Unsuitable => DeviceError::Unsuitable(path),
        DeviceFault::Ambiguous { found } => DeviceError::Ambiguous {
            path,
            found: found as usize,
        },
        DeviceFault::InUse => DeviceError::InUse(path),
    }
}

fn short(text: &str) -> String {
    text.chars().take(400).collect()
}

fn io_error(errno: Option<u32>, text: &str) -> io::Error {
    match errno.and_then(|errno| i32::try_from(errno).ok()) {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::other(short(text)),
    }
}

fn unfit() -> io::Error {
    io::Error::other("the terminal's answer does not fit the question")
}

fn lost(why: &dyn fmt::Display) -> io::Error {
    let text = format!("the connection with the terminal is lost: {why}");
    io::Error::new(io::ErrorKind::ConnectionAborted, text)
}

/// Waits in any thread, also in one of the runtime.
fn wait<T>(handle: &Handle, what: impl Future<Output = T>) -> T {
    block_in_place(|| handle.block_on(what))
}

/// An open device at a terminal.
struct Remote {
    handle: Handle,
    talk: Mutex<Talk>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}

/// A channel, and what is outstanding on it.
struct Talk {
    reader: DeviceReader,
    writer: DeviceWriter,
    /// Writes that are not answered.
    unanswered: u32,
    /// Why it cannot be used any more: a write has failed, or the connection is lost.
    failed: Option<(io::ErrorKind, Option<i32>, String)>,
}

impl Remote {
    fn of(stream: DeviceStream, handle: Handle) -> Self {
        Self {
            handle,
            talk: Mutex::new(Talk {
                reader: stream.reader,
                writer: stream.writer,
                unanswered: 0,
                failed: None,
            }),
        }
    }

    fn talk<T>(&self, act: impl AsyncFnOnce(&mut Talk) -> io::Result<T>) -> io::Result<T> {
        let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
        talk.usable()?;
        wait(&self.handle, act(&mut talk))
    }

    /// Sends a message, and returns its answer.
    fn ask(&self, message: &ToTerminal) -> io::Result<FromTerminal> {
        self.talk(async |talk| {
            talk.send(message).await?;
            talk.settle(0).await?;
            talk.receive().await
        })
    }

    /// Sends a message whose answer has no content.
    fn order(&self, message: &ToTerminal) -> io::Result<()> {
        match self.ask(message)? {
            FromTerminal::Done => Ok(()),
            answer => Err(failure(answer)),
        }
    }

    fn read_part(&self, at: u64, part: &mut [u8]) -> io::Result<()> {
        let bytes = u32::try_from(part.len()).map_err(io::Error::other)?;
        match self.ask(&ToTerminal::Read { at, bytes })? {
            FromTerminal::Content { content } if content.len() == part.len() => {
                part.copy_from_slice(&content);
                Ok(())
            }
            FromTerminal::End => Err(io::ErrorKind::UnexpectedEof.into()),
            answer => Err(failure(answer)),
        }
    }
}

/// Returns the error of an answer that is none of what was asked for.
fn failure(answer: FromTerminal) -> io::Error {
    match answer {
        FromTerminal::Failed(DeviceFault::Io { errno, text }) => io_error(errno, &text),
        FromTerminal::Refused(refusal) => io::Error::other(short(&refusal.text)),
        _ => unfit(),
    }
}

impl Talk {
    fn usable(&self) -> io::Result<()> {
        match &self.failed {
            None => Ok(()),
            Some((_, Some(errno), _)) => Err(io::Error::from_raw_os_error(*errno)),
            Some((kind, None, text)) => Err(io::Error::new(*kind, text.clone())),
        }
    }

    /// Notes that nothing can be done any more.
    fn fails(&mut self, error: io::Error) -> io::Error {
        self.failed = Some((error.kind(), error.raw_os_error(), error.to_string()));
        error
    }

    async fn send(&mut self, message: &ToTerminal) -> io::Result<()> {
        let bytes = wire::encode(message).map_err(io::Error::other)?;
        let sent = timeout(ANSWER_WAIT, self.writer.write(&bytes)).await;
        let sent = sent.map_err(|_| lost(&"it takes nothing"));
        match sent.and_then(|sent| sent.map_err(|error| lost(&error))) {
            Ok(()) => Ok(()),
            // An earlier write may have failed, after which the terminal ends the channel.
            Err(error) => {
                self.settle(0).await?;
                Err(self.fails(error))
            }
        }
    }

    async fn receive(&mut self) -> io::Result<FromTerminal> {
        let read = timeout(ANSWER_WAIT, self.reader.read()).await;
        let bytes = match read {
            Ok(Ok(Some(bytes))) => Ok(bytes),
            Ok(Ok(None)) => Err(lost(&"it has ended")),
            Ok(Err(error)) => Err(lost(&error)),
            Err(_) => Err(lost(&format!("no answer for {} s", ANSWER_WAIT.as_secs()))),
        };
        let answer = bytes.and_then(|it| wire::decode(&it).map_err(io::Error::other));
        answer.map_err(|error| self.fails(error))
    }

    /// Takes answers to writes until at most `ahead` are outstanding.
    async fn settle(&mut self, ahead: u32) -> io::Result<()> {
        while self.unanswered > ahead {
            self.unanswered -= 1;
            match self.receive().await? {
                FromTerminal::Done => {}
                answer => return Err(self.fails(failure(answer))),
            }
        }
        Ok(())
    }
}

impl Medium for Remote {
    fn length(&self) -> io::Result<u64> {
        match self.ask(&ToTerminal::QueryLength)? {
            FromTerminal::Length { bytes } => Ok(bytes),
            answer => Err(failure(answer)),
        }
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let parts = bytes.chunks_mut(PARCEL_TRANSFER_BYTES_MAX);
        parts.zip(0..).try_for_each(|(part, number): (_, u64)| {
            let from = number * PARCEL_TRANSFER_BYTES_MAX as u64;
            self.read_part(at + from, part)
        })
    }

    /// Sends the bytes. What fails is said by a later call, [`sync`](Medium::sync) at the latest.
    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let parts = bytes.chunks(PARCEL_TRANSFER_BYTES_MAX);
        parts.zip(0..).try_for_each(|(part, number): (_, u64)| {
            let message = ToTerminal::Write {
                at: at + number * PARCEL_TRANSFER_BYTES_MAX as u64,
                content: part.to_vec(),
            };
            self.talk(async |talk| {
                talk.settle(WRITES_AHEAD - 1).await?;
                talk.send(&message).await?;
                talk.unanswered += 1;
                Ok(())
            })
        })
    }

    fn sync(&self) -> io::Result<()> {
        let synced = self.order(&ToTerminal::Sync);
        synced.map_err(|error| {
            let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
            talk.fails(error)
        })
    }

    fn forget(&self) -> io::Result<()> {
        self.order(&ToTerminal::Forget)
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        self.order(&ToTerminal::Remove)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_at_a_terminal_is_told_from_a_path() {
        let name = |text: &str| {
            let name = Name::of(Path::new(text))?;
            Some((name.host, name.device, name.file))
        };
        let of = |host: &str, device: &str, file: Option<&str>| {
            let file = file.map(str::to_owned);
            Some((host.to_owned(), device.to_owned(), file))
        };
        assert_eq!(name("dock-1:wd1"), of("dock-1", "wd1", None));
        let file = Some("box-7-0.parcel");
        assert_eq!(name("dock-1:wd1/box-7-0.parcel"), of("dock-1", "wd1", file));
        for text in [
            "/mnt/usb0",
            "usb0",
            "./dock:wd1",
            "/mnt/a:b",
            "dock:",
            ":wd1",
            "dock:wd1/",
            "dock:wd1/a/b",
            "dock:/dev/sdb",
            "dock:..",
            "dock:wd1/../x",
            "dock:wd1/.x",
            "a b:wd1",
        ] {
            assert_eq!(name(text), None, "{text}");
        }
        let local = absolute(Path::new("./dock:wd1")).unwrap();
        assert!(local.is_absolute());
        assert_eq!(
            absolute(Path::new("dock:wd1")).unwrap(),
            Path::new("dock:wd1")
        );
    }
}
