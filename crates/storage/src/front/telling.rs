//! Write reporting: the server tells the owner of its disk of each write, once the image has it and
//! before the guest's request completes. It serves owners that keep a copy of the disk elsewhere.
//!
//! ```text
//! guest ──write──▶ server ──▶ image, then ──Written──▶ owner   then the write completes
//!                                         ──Waited───▶ owner   (periodically: the latencies)
//!                                         ◀─Answered── owner   (only where Begin asks for that)
//!                                         ◀───Mark──── owner
//!                                         ──Reached──▶ owner   (all earlier writes are reported)
//! ```
//!
//! An owner that has disconnected, or does not read for some time, does not delay the guest: before
//! an unreported write completes, the record of the fallback is made ([`FrontFolder::fell_back`]),
//! and from then on nothing is reported.

use super::folder::FrontFolder;
use super::message::{message, not_understood, words};
use super::server::{ServeError, serve};
use super::watched::{WatchedDisk, WriteSink};
use crate::disk::RawDisk;
use crate::nbd::{Export, Notice, others_go_on};
use crate::pulse::elsewhere;
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use super::message::MESSAGE_BYTES;

/// Time for an owner to take a report, or to choose how writes are reported.
const OWNER_PATIENCE: Duration = Duration::from_secs(5);
/// A request below this latency was answered from memory, and says nothing about the disk.
const FROM_MEMORY: Duration = Duration::from_micros(100);
/// The time between two reports of latencies.
const WAITED_EVERY: Duration = Duration::from_millis(50);
/// The time between two attempts to make the record without which no unreported write completes.
const MARK_AGAIN: Duration = Duration::from_millis(200);

/// A message of a server to its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToOwner {
    /// These bytes of the image have changed, or may have.
    Written {
        /// The server's name for the request.
        id: u64,
        /// The bytes.
        bytes: Range<u64>,
    },
    /// All writes that completed before this mark arrived have been reported.
    Reached(u64),
    /// The latencies of reads and writes that were not answered from memory.
    Waited {
        /// The number of requests.
        requests: u64,
        /// The sum of their latencies.
        together: Duration,
    },
}

/// A message of an owner to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToServer {
    /// The first message: whether each write waits for the owner's answer.
    Begin {
        /// Whether it does.
        answers: bool,
    },
    /// This request may complete.
    Answered(u64),
    /// Answer with `Reached` when all earlier writes are reported.
    Mark(u64),
}

impl ToOwner {
    /// Returns the message's bytes.
    pub fn to_bytes(&self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Written { id, bytes } => message([1, *id, bytes.start, bytes.end]),
            Self::Reached(mark) => message([2, *mark, 0, 0]),
            Self::Waited { requests, together } => {
                let us = u64::try_from(together.as_micros()).unwrap_or(u64::MAX);
                message([3, *requests, us, 0])
            }
        }
    }

    /// Parses a message.
    pub fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self> {
        match words(bytes) {
            [3, requests, us, 0] => Ok(Self::Waited {
                requests,
                together: Duration::from_micros(us),
            }),
            [1, id, start, end] if start <= end => Ok(Self::Written {
                id,
                bytes: start..end,
            }),
            [2, mark, 0, 0] => Ok(Self::Reached(mark)),
            _ => Err(not_understood()),
        }
    }
}

impl ToServer {
    /// Returns the message's bytes.
    pub fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Begin { answers } => message([1, u64::from(answers), 0, 0]),
            Self::Answered(id) => message([2, id, 0, 0]),
            Self::Mark(mark) => message([3, mark, 0, 0]),
        }
    }

    /// Parses a message.
    pub fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self> {
        match words(bytes) {
            [1, answers @ 0..=1, 0, 0] => Ok(Self::Begin {
                answers: answers == 1,
            }),
            [2, id, 0, 0] => Ok(Self::Answered(id)),
            [3, mark, 0, 0] => Ok(Self::Mark(mark)),
            _ => Err(not_understood()),
        }
    }
}

/// Exports the image, and reports every write to the owner; without an owner that accepts reports
/// it only passes requests through, and makes the record of the fallback.
pub fn telling(
    folder: &FrontFolder,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let spec = folder.spec()?;
    let open = || {
        let disk = RawDisk::open(&spec.image, spec.size)?;
        let sink = Owner::connect(folder.clone());
        let disk = Arc::new(WatchedDisk { disk, sink });
        let name = spec.name;
        Ok(Export { name, disk })
    };
    serve(folder, open, notify)
}

/// The owner, while it is connected.
#[derive(Debug)]
struct Owner {
    folder: FrontFolder,
    line: Option<Arc<Line>>,
    /// Whether the record is made: nothing has to be reported any more.
    marked: Mutex<bool>,
    waits: Mutex<Waits>,
}

/// Requests not answered from memory, since the last report.
#[derive(Debug)]
struct Waits {
    requests: u64,
    together: Duration,
    told_at: Instant,
}

#[derive(Debug)]
struct Line {
    stream: UnixStream,
    answers: bool,
    /// Serializes messages.
    writing: Mutex<u64>,
    state: Mutex<LineState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LineState {
    gone: bool,
    /// Requests that wait for an answer.
    waiting: BTreeSet<u64>,
}

impl Owner {
    fn connect(folder: FrontFolder) -> Self {
        // A missed write stays missed.
        let marked = folder.fell_back();
        let line = match marked {
            true => None,
            false => Line::open(&folder).ok(),
        };
        Self {
            folder,
            line,
            marked: Mutex::new(marked),
            waits: Mutex::new(Waits {
                requests: 0,
                together: Duration::ZERO,
                told_at: Instant::now(),
            }),
        }
    }

    /// Makes the record; no unreported write completes before that.
    fn mark(&self) {
        let mut marked = lock(&self.marked);
        while !*marked {
            match self.folder.note_fallback() {
                Ok(()) => *marked = true,
                Err(_) => elsewhere(|| thread::sleep(MARK_AGAIN)),
            }
        }
    }
}

impl WriteSink for Owner {
    // A report before the write would let the engine send the old content.
    fn begins(&self, _: &Range<u64>) -> io::Result<()> {
        Ok(())
    }

    /// Reports a write. Returns when it may complete.
    fn done(&self, bytes: Range<u64>) {
        let told = self.line.as_ref().is_some_and(|line| line.written(bytes));
        if !told {
            self.mark();
        }
    }

    /// Records the latency of a request.
    fn took(&self, took: Duration) {
        let Some(line) = self.line.as_ref().filter(|_| took >= FROM_MEMORY) else {
            return;
        };
        let mut waits = lock(&self.waits);
        waits.requests += 1;
        waits.together += took;
        if waits.told_at.elapsed() < WAITED_EVERY {
            return;
        }
        let Waits {
            requests, together, ..
        } = *waits;
        *waits = Waits {
            requests: 0,
            together: Duration::ZERO,
            told_at: Instant::now(),
        };
        drop(waits);
        line.waited(requests, together);
    }
}

impl Line {
    fn open(folder: &FrontFolder) -> io::Result<Arc<Self>> {
        let mut stream = UnixStream::connect(folder.owner())?;
        stream.set_read_timeout(Some(OWNER_PATIENCE))?;
        stream.set_write_timeout(Some(OWNER_PATIENCE))?;
        let mut bytes = [0; MESSAGE_BYTES];
        stream.read_exact(&mut bytes)?;
        let ToServer::Begin { answers } = ToServer::from_bytes(&bytes)? else {
            return Err(not_understood());
        };
        stream.set_read_timeout(None)?;
        let line = Arc::new(Self {
            stream,
            answers,
            writing: Mutex::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let reading = line.clone();
        thread::Builder::new()
            .name("owner".to_owned())
            .spawn(move || {
                // However it ends, no more reports are sent.
                let _ = reading.read();
                reading.end();
            })?;
        Ok(line)
    }

    fn read(&self) -> io::Result<()> {
        loop {
            let mut bytes = [0; MESSAGE_BYTES];
            (&self.stream).read_exact(&mut bytes)?;
            match ToServer::from_bytes(&bytes)? {
                ToServer::Answered(id) => {
                    lock(&self.state).waiting.remove(&id);
                    self.changed.notify_all();
                }
                ToServer::Mark(mark) => {
                    let _writing = lock(&self.writing);
                    (&self.stream).write_all(&ToOwner::Reached(mark).to_bytes())?;
                }
                ToServer::Begin { .. } => return Err(not_understood()),
            }
        }
    }

    /// Reports latencies; a disconnected owner need not know them.
    fn waited(&self, requests: u64, together: Duration) {
        let message = ToOwner::Waited { requests, together }.to_bytes();
        let sent = elsewhere(|| {
            let _writing = lock(&self.writing);
            let gone = lock(&self.state).gone;
            gone || (&self.stream).write_all(&message).is_ok()
        });
        if !sent {
            // A part of the message may have been sent: nothing can follow it.
            self.end();
        }
    }

    /// Reports a write. Returns whether the owner knows of it.
    fn written(&self, bytes: Range<u64>) -> bool {
        elsewhere(|| {
            let mut last = lock(&self.writing);
            *last += 1;
            let id = *last;
            {
                let mut state = lock(&self.state);
                if state.gone {
                    return false;
                }
                if self.answers {
                    state.waiting.insert(id);
                }
            }
            let message = ToOwner::Written { id, bytes }.to_bytes();
            let sent = (&self.stream).write_all(&message);
            drop(last);
            if sent.is_err() {
                // A part of the message may have been sent: nothing can follow it.
                self.end();
                return false;
            }
            !self.answers || others_go_on(|| self.is_answered(id))
        })
    }

    /// Waits for the owner's answer; `false` when none will arrive.
    fn is_answered(&self, id: u64) -> bool {
        let waits = |state: &mut LineState| !state.gone && state.waiting.contains(&id);
        let waited = self.changed.wait_while(lock(&self.state), waits);
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        !state.waiting.contains(&id)
    }

    fn end(&self) {
        lock(&self.state).gone = true;
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No operation under such a lock leaves its state half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, ExportSize, Zeros};
    use crate::front::FrontSpec;
    use crate::nbd::ExportName;
    use std::fs::File;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    struct Fixture {
        _folder: tempfile::TempDir,
        front: FrontFolder,
        listener: UnixListener,
    }

    fn fixture() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let spec = FrontSpec {
            image,
            size: ExportSize::OfFile,
            locks: None,
            name: ExportName::new("0123456789abcdef".repeat(2)).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: false,
            fetched: None,
            socket: None,
        };
        let front = FrontFolder::create(&folder.path().join("f"), &spec).unwrap();
        let listener = UnixListener::bind(front.owner()).unwrap();
        Fixture {
            _folder: folder,
            front,
            listener,
        }
    }

    impl Fixture {
        fn disk(&self, answers: bool) -> (Arc<WatchedDisk<Owner>>, UnixStream) {
            let opened = thread::scope(|scope| {
                let open = scope.spawn(|| {
                    let spec = self.front.spec().unwrap();
                    Arc::new(WatchedDisk {
                        disk: RawDisk::open(&spec.image, spec.size).unwrap(),
                        sink: Owner::connect(self.front.clone()),
                    })
                });
                let (mut owner, _) = self.listener.accept().unwrap();
                let begin = ToServer::Begin { answers };
                owner.write_all(&begin.to_bytes()).unwrap();
                (open.join().unwrap(), owner)
            });
            assert!(opened.0.sink.line.is_some());
            opened
        }
    }

    fn any_heard(owner: &mut UnixStream) -> ToOwner {
        let mut bytes = [0; MESSAGE_BYTES];
        owner.read_exact(&mut bytes).unwrap();
        ToOwner::from_bytes(&bytes).unwrap()
    }

    /// Returns the next message other than latencies.
    fn heard(owner: &mut UnixStream) -> ToOwner {
        loop {
            match any_heard(owner) {
                ToOwner::Waited { .. } => {}
                told => return told,
            }
        }
    }

    #[test]
    fn messages_survive_their_bytes_and_nothing_else_is_one() {
        let told = [
            ToOwner::Written {
                id: 7,
                bytes: 512..1 << 40,
            },
            ToOwner::Reached(9),
            ToOwner::Waited {
                requests: 3,
                together: Duration::from_millis(7),
            },
        ];
        for told in told {
            assert_eq!(ToOwner::from_bytes(&told.to_bytes()).unwrap(), told);
        }
        for said in [
            ToServer::Begin { answers: true },
            ToServer::Answered(3),
            ToServer::Mark(4),
        ] {
            assert_eq!(ToServer::from_bytes(&said.to_bytes()).unwrap(), said);
        }
        for wrong in [
            [0; 4],
            [1, 0, 2, 1],
            [2, 0, 0, 1],
            [3, 0, 0, 1],
            [9, 0, 0, 0],
        ] {
            ToOwner::from_bytes(&message(wrong)).unwrap_err();
        }
        for wrong in [[0; 4], [1, 2, 0, 0], [3, 0, 1, 0]] {
            ToServer::from_bytes(&message(wrong)).unwrap_err();
        }
    }

    #[test]
    fn every_change_is_told_before_it_is_answered_and_marks_come_after() {
        let fixture = fixture();
        let (disk, mut owner) = fixture.disk(false);
        disk.write(512, &[1; 1024]).unwrap();
        disk.zero(4096..8192, Zeros::MayBeHole).unwrap();
        disk.discard(8192..9216).unwrap();
        disk.write(2 << 20, &[1]).unwrap_err();
        owner.write_all(&ToServer::Mark(5).to_bytes()).unwrap();
        for (id, bytes) in [512..1536, 4096..8192, 8192..9216, 2 << 20..(2 << 20) + 1]
            .into_iter()
            .enumerate()
        {
            let id = id as u64 + 1;
            assert_eq!(heard(&mut owner), ToOwner::Written { id, bytes });
        }
        assert_eq!(heard(&mut owner), ToOwner::Reached(5));
        assert!(!fixture.front.fell_back());
    }

    #[test]
    fn how_long_requests_take_is_told_now_and_then() {
        let fixture = fixture();
        let (disk, mut owner) = fixture.disk(false);
        disk.sink.took(FROM_MEMORY / 2);
        disk.sink.took(FROM_MEMORY * 10);
        thread::sleep(WAITED_EVERY);
        disk.sink.took(FROM_MEMORY / 2);
        disk.sink.took(FROM_MEMORY * 20);
        let (mut all, mut time) = (0, Duration::ZERO);
        while all < 2 {
            // Both at once, unless the test was held up.
            match any_heard(&mut owner) {
                ToOwner::Waited { requests, together } => {
                    (all, time) = (all + requests, time + together)
                }
                told => panic!("{told:?}"),
            }
        }
        assert_eq!((all, time), (2, FROM_MEMORY * 30));
        drop(owner);
        thread::sleep(WAITED_EVERY);
        disk.sink.took(FROM_MEMORY);
        assert!(!fixture.front.fell_back(), "it has missed no write");
    }

    #[test]
    fn a_write_waits_for_its_answer_and_not_for_an_owner_that_is_gone() {
        let fixture = fixture();
        let (disk, mut owner) = fixture.disk(true);
        let (ended, ends) = mpsc::channel();
        let writing = disk.clone();
        let writer = thread::spawn(move || {
            for offset in [0, 4096] {
                writing.write(offset, &[7; 512]).unwrap();
                ended.send(()).unwrap();
            }
        });
        assert!(matches!(heard(&mut owner), ToOwner::Written { id: 1, .. }));
        let early = ends.recv_timeout(Duration::from_millis(50));
        assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
        owner.write_all(&ToServer::Answered(1).to_bytes()).unwrap();
        ends.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(matches!(heard(&mut owner), ToOwner::Written { id: 2, .. }));
        assert!(!fixture.front.fell_back());
        drop(owner);
        ends.recv_timeout(Duration::from_secs(60)).unwrap();
        writer.join().unwrap();
        assert!(fixture.front.fell_back(), "it was answered untold");
        disk.write(0, &[8; 512]).unwrap();
    }

    #[test]
    fn without_an_owner_the_first_write_says_that_nobody_watches() {
        let fixture = fixture();
        drop(fixture.listener);
        let spec = fixture.front.spec().unwrap();
        let disk = WatchedDisk {
            disk: RawDisk::open(&spec.image, spec.size).unwrap(),
            sink: Owner::connect(fixture.front.clone()),
        };
        disk.read(0, &mut [0; 512]).unwrap();
        assert!(!fixture.front.fell_back());
        disk.write(0, &[1; 512]).unwrap();
        assert!(fixture.front.fell_back());
        // It stays so for later servers.
        assert!(Owner::connect(fixture.front.clone()).line.is_none());
    }
}
