//! The supervisor: it holds the listening socket and the image's locks, and ensures that one server
//! answers, and never two.
//!
//! ```text
//!   ┌▶ the turn is free ─▶ a server is started ─▶ it dies, or hangs and is killed ─┐
//!   └── (too often: the fallback is next) ◀── it is dead: waited for ─────────────┘
//! ```

use super::control::{Answer, Asked, Command as Asks, Status};
use super::folder::{FolderError, FrontFolder, FrontSpec, failed};
use super::heart::{BEAT_BYTES, read_beat};
use super::processes::{is_held, is_starved};
use super::turn::{Turn, TurnError, end_holder};
use crate::disk::{ImageLock, RawDisk};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How often an idle supervisor checks its server.
const TICK: Duration = Duration::from_millis(100);
/// How often a killed process is checked for its end.
const SOON: Duration = Duration::from_millis(5);
/// Time for an earlier supervisor, which was killed, to end.
const TAKE_OVER_PATIENCE: Duration = Duration::from_secs(2);

/// A program that starts a server; the supervisor sets its standard input and output.
type Program = dyn Fn() -> Command;

/// The programs that answer.
///
/// A program calls [`super::serve`] or [`super::pass_through`] on the folder. It may be killed at
/// any time, and started again: when it answers, it must not depend on its memory for anything that
/// has to persist.
pub struct Programs {
    /// The server.
    pub server: Box<Program>,
    /// The fallback that answers permanently when the server fails repeatedly, if there is one.
    ///
    /// The owner of the disk guarantees that the fallback's disk is correct for the guest at any
    /// point of the move, and that it is correct for the owner again afterwards: before the
    /// fallback starts, [`FrontFolder::fell_back`] becomes true and stays so, and every user of the
    /// server's knowledge of the disk must check it first. So [`super::pass_through`] is correct
    /// where the image's file holds the whole disk: at the source, whose owner abandons the move or
    /// compares the disk again; at the destination only before the guest runs, or when no block is
    /// missing any more. Where chunks are missing, only a fallback that knows them would be
    /// correct: without one the server is started again and again, and the guest waits.
    pub fallback: Option<Box<Program>>,
}

/// The conditions under which a server has failed.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// The time without a beat after which a server counts as hanging, and the time for which its
    /// oldest request may be in the server's own code, unless the system holds one of its threads
    /// or gives it no processor.
    pub hang: Duration,
    /// This number of failures...
    pub failures: usize,
    /// ...within this time makes the fallback answer.
    pub within: Duration,
    /// The time between a second consecutive failure and the next start. After the first failure
    /// the next start is immediate.
    pub pause: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            hang: Duration::from_secs(10),
            failures: 4,
            within: Duration::from_secs(120),
            pause: Duration::from_millis(250),
        }
    }
}

/// An event of a disk export.
#[derive(Debug, thiserror::Error)]
pub enum Event {
    /// A server of an earlier supervisor was running; it is being killed.
    #[error("ending the disk export {0}, which an earlier supervisor has left")]
    TakenOver(i32),
    /// A server was started.
    #[error(
        "the disk export {pid} was started{}",
        if *.fallback { ", which only passes through" } else { "" }
    )]
    Started {
        /// The process.
        pid: u32,
        /// Whether it is the fallback.
        fallback: bool,
    },
    /// A server could not be started.
    #[error("the disk export cannot be started: {0}")]
    NotStarted(io::Error),
    /// A server died.
    #[error("the disk export died ({0}); the guest waits for the next one")]
    Died(String),
    /// A server hangs; it is being killed.
    #[error("the disk export {pid} hangs and is killed: {why}")]
    Hung {
        /// The process.
        pid: u32,
        /// The symptom.
        why: String,
    },
    /// It is late, or was killed, and the system holds it.
    #[error(
        "the disk export {0} waits for the system, a slow disk for one; nothing else can be done"
    )]
    Held(i32),
    /// The server failed too often.
    #[error("the disk export failed too often: from now on requests only pass through")]
    FellBack,
    /// The server failed too often, and the record of the fallback cannot be written.
    #[error("{0}; so the fallback cannot be used, and the disk export is started again")]
    NoFallback(FolderError),
    /// An owner sent an invalid command.
    #[error("the supervisor was asked something that it does not understand: {0}")]
    Asked(io::Error),
}

/// A reason why a supervisor ended. Servers that answer continue without it.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    /// Another process supervises.
    #[error("another supervisor sees to this disk: {0}")]
    Turn(#[from] TurnError),
    /// Its folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The system refused.
    #[error("cannot supervise a disk export: {0}")]
    Io(#[from] io::Error),
}

/// A supervisor. Its process must not start other processes meanwhile.
pub struct Supervisor {
    folder: FrontFolder,
    spec: FrontSpec,
    programs: Programs,
    policy: Policy,
    report: Box<dyn FnMut(Event)>,
    listener: OwnedFd,
    control: UnixListener,
    locks: Option<ImageLock>,
    /// The times of recent failures.
    failed: VecDeque<Instant>,
    failures: u64,
    fell_back: bool,
    server_pid: Option<u32>,
    stop: Option<Asked>,
    _turn: Turn,
}

/// How a server ended.
enum End {
    Failed,
    Stopped,
}

/// Whether a server hangs.
enum Hang {
    No,
    /// It is late, and the system holds it.
    Held,
    /// The symptom.
    Yes(String),
}

impl Supervisor {
    /// Begins to supervise, in place of an earlier supervisor that is dead. From here on clients
    /// can connect, and wait. The image's locks are taken beside QEMU's.
    pub fn start(
        folder: FrontFolder,
        programs: Programs,
        policy: Policy,
        report: impl FnMut(Event) + 'static,
    ) -> Result<Self, SupervisorError> {
        let turn = Turn::take(&folder.supervision(), TAKE_OVER_PATIENCE)?;
        let spec = folder.spec()?;
        let listener = folder.listen(&folder.socket_of(&spec), spec.qemu_uid)?;
        let control = folder.listen(&folder.control(), None)?;
        control.set_nonblocking(true)?;
        let mut supervisor = Self {
            fell_back: folder.fell_back(),
            folder,
            spec,
            programs,
            policy,
            report: Box::new(report),
            listener: listener.into(),
            control,
            locks: None,
            failed: VecDeque::new(),
            failures: 0,
            server_pid: None,
            stop: None,
            _turn: turn,
        };
        supervisor.take_locks()?;
        Ok(supervisor)
    }

    /// Keeps one server answering until an owner stops it.
    pub fn run(mut self) -> Result<(), SupervisorError> {
        while self.stop.is_none() {
            self.end_others()?;
            if self.stop.is_some() {
                break;
            }
            if self.serve()?.is_failure() {
                self.failed()?;
            }
        }
        self.end()
    }

    fn end(mut self) -> Result<(), SupervisorError> {
        self.locks = None;
        for socket in [self.folder.socket_of(&self.spec), self.folder.control()] {
            fs::remove_file(&socket).map_err(|error| failed(&socket, error))?;
        }
        let status = self.status();
        if let Some(asked) = self.stop.take() {
            // The owner may have disconnected; its command has been carried out.
            let _ = asked.answer(&Answer::Done(status));
        }
        Ok(())
    }

    /// Kills servers of earlier supervisors. The next server is started when the turn is free.
    fn end_others(&mut self) -> Result<(), SupervisorError> {
        let turn = self.folder.turn();
        let began = Instant::now();
        let (mut told, mut held) = (None, false);
        while let Some(pid) = end_holder(&turn).map_err(|error| failed(&turn, error))? {
            if told.replace(pid) != Some(pid) {
                (self.report)(Event::TakenOver(pid));
            }
            if began.elapsed() > self.policy.hang && !std::mem::replace(&mut held, true) {
                (self.report)(Event::Held(pid));
            }
            self.look(SOON, None)?;
        }
        Ok(())
    }

    /// Runs one server until it is dead.
    fn serve(&mut self) -> Result<End, SupervisorError> {
        let (beats, theirs) = UnixDatagram::pair()?;
        beats.set_nonblocking(true)?;
        let program = match &self.programs.fallback {
            Some(fallback) if self.fell_back => fallback,
            _ => &self.programs.server,
        };
        let spawned = program()
            .stdin(Stdio::from(self.listener.try_clone()?))
            .stdout(Stdio::from(OwnedFd::from(theirs)))
            .spawn();
        let child = match spawned {
            Ok(child) => child,
            Err(error) => {
                (self.report)(Event::NotStarted(error));
                return Ok(End::Failed);
            }
        };
        let mut server = Watched::new(child, beats)?;
        self.server_pid = Some(server.child.id());
        (self.report)(Event::Started {
            pid: server.child.id(),
            fallback: self.fell_back,
        });
        let end = self.watch(&mut server);
        self.server_pid = None;
        end
    }

    fn watch(&mut self, server: &mut Watched) -> Result<End, SupervisorError> {
        let pid = server.child.id();
        let mut held = false;
        loop {
            self.look(TICK, Some(server))?;
            if let Some(status) = server.child.try_wait()? {
                (self.report)(Event::Died(status.to_string()));
                return Ok(End::Failed);
            }
            if self.stop.is_some() {
                self.kill(server)?;
                return Ok(End::Stopped);
            }
            match self.hang(server) {
                Hang::No => {}
                Hang::Held if held => {}
                Hang::Held => {
                    held = true;
                    (self.report)(Event::Held(pid.cast_signed()));
                }
                Hang::Yes(why) => {
                    (self.report)(Event::Hung { pid, why });
                    self.kill(server)?;
                    return Ok(End::Failed);
                }
            }
        }
    }

    fn hang(&self, server: &mut Watched) -> Hang {
        let pid = server.child.id();
        if server.late(self.policy.hang).is_none() || is_starved(pid) {
            return Hang::No;
        }
        // Killing it would have no effect, and it may continue.
        if is_held(pid) {
            return Hang::Held;
        }
        // It may have been given a processor just before it was inspected.
        server.listen(Duration::ZERO);
        server.late(self.policy.hang).map_or(Hang::No, Hang::Yes)
    }

    /// Kills a server. Returns when all of its threads have ended.
    fn kill(&mut self, server: &mut Watched) -> Result<(), SupervisorError> {
        server.child.kill()?;
        let killed = Instant::now();
        let mut told = false;
        while server.child.try_wait()?.is_none() {
            self.look(TICK, Some(server))?;
            if killed.elapsed() > self.policy.hang && !std::mem::replace(&mut told, true) {
                (self.report)(Event::Held(server.child.id().cast_signed()));
            }
        }
        Ok(())
    }

    /// Decides what follows a failure.
    fn failed(&mut self) -> Result<(), SupervisorError> {
        self.failures += 1;
        let now = Instant::now();
        let within = self.policy.within;
        self.failed.retain(|at| now.duration_since(*at) < within);
        self.failed.push_back(now);
        let too_often = self.failed.len() >= self.policy.failures;
        if too_often && !self.fell_back && self.programs.fallback.is_some() {
            match self.folder.note_fallback() {
                Ok(()) => {
                    self.fell_back = true;
                    self.failed.clear();
                    (self.report)(Event::FellBack);
                    return Ok(());
                }
                Err(error) => (self.report)(Event::NoFallback(error)),
            }
        }
        if too_often {
            self.failed.pop_front();
        }
        let until = now + self.policy.pause;
        while self.failed.len() > 1 && self.stop.is_none() && Instant::now() < until {
            self.look(TICK.min(self.policy.pause), None)?;
        }
        Ok(())
    }

    /// Waits for an event, at most this long, and carries out owners' commands.
    fn look(
        &mut self,
        within: Duration,
        mut server: Option<&mut Watched>,
    ) -> Result<(), SupervisorError> {
        let before = Instant::now();
        let asked = {
            let mut ready = vec![PollFd::new(self.control.as_fd(), PollFlags::POLLIN)];
            if let Some(server) = server.as_deref() {
                let [process, beats] = server.fds();
                ready.push(PollFd::new(process, PollFlags::POLLIN));
                ready.push(PollFd::new(beats, PollFlags::POLLIN));
            }
            let timeout = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
            match poll(&mut ready, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            ready[0].any().unwrap_or(true)
        };
        if let Some(server) = &mut server {
            server.listen(before.elapsed());
        }
        if asked && let Ok((stream, _)) = self.control.accept() {
            match Asked::read(stream) {
                Ok(asked) => self.answer(asked),
                Err(error) => (self.report)(Event::Asked(error)),
            }
        }
        Ok(())
    }

    fn answer(&mut self, asked: Asked) {
        let done = match asked.command {
            Asks::Status => Ok(()),
            Asks::TakeLocks => self.take_locks(),
            Asks::GiveLocks => {
                self.locks = None;
                Ok(())
            }
            Asks::Stop => {
                // The first owner that asks for the stop is answered when it is done.
                self.stop.get_or_insert(asked);
                return;
            }
        };
        let answer = match done {
            Ok(()) => Answer::Done(self.status()),
            Err(error) => Answer::Failed(error.to_string()),
        };
        if let Err(error) = asked.answer(&answer) {
            (self.report)(Event::Asked(error));
        }
    }

    fn take_locks(&mut self) -> Result<(), SupervisorError> {
        let Some(image_use) = self.spec.locks else {
            return Ok(());
        };
        if self.locks.is_none() {
            let image = &self.spec.image;
            let disk = RawDisk::open(image, self.spec.size).map_err(io::Error::other)?;
            self.locks = Some(ImageLock::beside(disk.file(), image_use)?);
        }
        Ok(())
    }

    fn status(&self) -> Status {
        Status {
            server_pid: self.server_pid,
            failures: self.failures,
            fell_back: self.fell_back,
            locked: self.locks.is_some(),
        }
    }
}

impl End {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Failed)
    }
}

/// A supervised server.
struct Watched {
    child: Child,
    process: OwnedFd,
    beats: UnixDatagram,
    /// The time without a beat, as far as this process was running to receive one.
    silent: Duration,
    /// The content of the last beat.
    oldest: Duration,
}

impl Watched {
    fn new(mut child: Child, beats: UnixDatagram) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(process) => Ok(Self {
                child,
                process,
                beats,
                silent: Duration::ZERO,
                oldest: Duration::ZERO,
            }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error.into())
            }
        }
    }

    fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.process.as_fd(), self.beats.as_fd()]
    }

    /// Receives pending beats after a wait of this length.
    fn listen(&mut self, waited: Duration) {
        // A supervisor that was itself held up has not received all beats.
        self.silent += waited.min(2 * TICK);
        // One byte more than a beat, so that a longer message is not taken for one.
        let mut bytes = [0; BEAT_BYTES + 1];
        while let Ok(length) = self.beats.recv(&mut bytes) {
            if let Some(oldest) = read_beat(&bytes[..length]) {
                self.silent = Duration::ZERO;
                self.oldest = oldest;
            }
        }
    }

    /// Returns the symptom if the server hangs.
    fn late(&self, limit: Duration) -> Option<String> {
        if self.silent >= limit {
            let silent = self.silent.as_secs_f64();
            return Some(format!("it said nothing for {silent:.1} s"));
        }
        if self.oldest >= limit {
            let oldest = self.oldest.as_secs_f64();
            return Some(format!("a request has been with it for {oldest:.1} s"));
        }
        None
    }
}
