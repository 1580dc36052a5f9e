//! A pump's connection: one thread carries out its messages in their order, and replies wait in a
//! queue, so that no request waits for a pump.

use super::disk::ArrivingDisk;
use super::line::{MESSAGE_BYTES, ToPump, ToServer};
use crate::front::folder::FrontFolder;
use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Limit on messages queued for a pump: one that does not read them is disconnected, and gets the
/// state again when it reconnects.
const QUEUE_MAX: usize = 1 << 16;

/// The connected pump.
#[derive(Debug)]
pub(super) struct Pump {
    stream: UnixStream,
    queue: Mutex<Queue>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<ToPump>,
    /// The last state that was sent.
    state: Option<ToPump>,
    ended: bool,
}

impl Pump {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, message: ToPump) {
        let mut queue = self.lock();
        queue.messages.push_back(message);
        let full = queue.messages.len() > QUEUE_MAX;
        drop(queue);
        self.filled.notify_all();
        if full {
            self.end();
        }
    }

    /// Sends a state if it differs from the last one.
    pub(super) fn tell_state(&self, message: ToPump) {
        let before = self.lock().state.replace(message);
        if before != Some(message) {
            self.tell(message);
        }
    }

    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.filled.notify_all();
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn speak(&self) -> io::Result<()> {
        loop {
            let mut queue = self.lock();
            let message = loop {
                if queue.ended {
                    return Ok(());
                }
                match queue.messages.pop_front() {
                    Some(message) => break message,
                    None => {
                        let waited = self.filled.wait(queue);
                        queue = waited.unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(queue);
            (&self.stream).write_all(&message.to_bytes())?;
        }
    }

    fn hear(&self, disk: &ArrivingDisk) -> io::Result<()> {
        let mut content = Vec::new();
        // A failed write ends a connection: later blocks are brought again.
        let mut failed = None;
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(nix::libc::EIO);
        loop {
            let mut bytes = [0; MESSAGE_BYTES];
            (&self.stream).read_exact(&mut bytes)?;
            let message = ToServer::from_bytes(&bytes)?;
            content.resize(message.content_bytes(), 0);
            (&self.stream).read_exact(&mut content)?;
            match message {
                ToServer::Listed => {
                    if !disk.listed().map_err(io::Error::other)? {
                        return Err(io::Error::other("there are no masks"));
                    }
                }
                ToServer::Blocks(_) | ToServer::Zeros(_) if failed.is_some() => {}
                ToServer::Blocks(range) => {
                    failed = disk.came(range, Some(&content)).err().map(errno);
                }
                ToServer::Zeros(range) => failed = disk.came(range, None).err().map(errno),
                ToServer::Barrier(number) => self.tell(match failed {
                    None => ToPump::Reached(number),
                    Some(errno) => ToPump::Failed(errno),
                }),
                ToServer::Unreadable(range) => disk.unreadable(range),
            }
        }
    }
}

/// Accepts pumps' connections; each replaces the one before.
pub(super) fn listen(folder: &FrontFolder, disk: &Arc<ArrivingDisk>) -> io::Result<()> {
    let path = folder.pump();
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    let disk = disk.clone();
    let accept = move || {
        for stream in listener.incoming() {
            // A pump that cannot be accepted reconnects.
            let Ok(stream) = stream else { continue };
            let pump = Arc::new(Pump {
                stream,
                queue: Mutex::default(),
                filled: Condvar::new(),
            });
            disk.connected(&pump);
            let speaking = pump.clone();
            let spoken = thread::Builder::new()
                .name("pump-out".to_owned())
                .spawn(move || {
                    // However it ends, the other thread notices.
                    let _ = speaking.speak();
                    speaking.end();
                });
            let (hearing, disk) = (pump.clone(), disk.clone());
            let heard = thread::Builder::new()
                .name("pump-in".to_owned())
                .spawn(move || {
                    // Whatever the error was, the pump reconnects and gets the state again.
                    let _ = hearing.hear(&disk);
                    disk.disconnected(&hearing);
                    hearing.end();
                });
            if spoken.is_err() || heard.is_err() {
                pump.end();
            }
        }
    };
    let builder = thread::Builder::new().name("pump".to_owned());
    builder.spawn(accept).map(drop)
}
