//! Implements the thread that reads a source's migration socket, and its state shared with the
//! pacing task.
//!
//! ```text
//!        run(goal)                        flush()
//! RESTS ----------> RUNS (to the goal) ----------> FLUSHES -> ENDED(Complete)
//!   ^---------------'  |                             |
//!                      '-----------------------------'-----> ENDED(Failed)
//! ```

use super::guest_memory::GuestMemory;
use super::outgoing::{Event, Written};
use longhaul_protocol::BlockRange;
use longhaul_qemu_stream as stream;
use longhaul_qemu_stream::{Content, Page, ParseError, Parser, Prelude};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// The maximum number of events that wait for the owner before the reader rests.
const EVENTS_MAX: usize = 64;
/// The maximum number of runs of blocks in one event.
const RUNS_MAX: usize = 1024;
/// The size of a read; these bytes count as unread when the reader rests.
const READ_BYTES: usize = 64 << 10;
/// The size of a read at the end of a pass, so that QEMU does not run ahead.
const READ_BYTES_AT_END: usize = 4096;
/// How long the reader waits for bytes before it checks whether it is still needed.
const PATIENCE_MS: u16 = 100;
/// The pause after a section without pages, while waiting for the next pass.
const EMPTY_SECTION_PAUSE: Duration = Duration::from_millis(2);

/// The end of a run of the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Everything before the first page.
    Prelude,
    /// The first page at or behind this place in the stream's order.
    Place { block: usize, page: u64 },
    /// This number of pages.
    Pages(u64),
    /// The first page of the next pass.
    NextPass,
    /// No goal: until another order.
    Open,
}

/// The end of the stream.
#[derive(Debug, Clone)]
pub(crate) enum End {
    /// The device state is complete.
    Complete(Vec<u8>),
    /// It cannot be read further.
    Failed(ReadError),
}

/// Why a source's stream cannot be read further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The stream is malformed.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// QEMU closed it.
    #[error("QEMU closed its migration socket before the end")]
    Closed,
    /// A system call failed.
    #[error("cannot read QEMU's migration socket: {0}")]
    System(String),
    /// A block that QEMU did not list.
    #[error("QEMU migrates RAM block `{0}`, which it does not list, or with another size")]
    Block(String),
}

#[derive(Debug)]
enum Mode {
    Rest,
    Run(Goal),
    Flush,
    Quit,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    /// Counts the changes of the mode.
    orders: u64,
    /// Whether the thread is working.
    busy: bool,
    /// Whether the owner holds the reader, whatever the mode.
    held: bool,
    /// The number of callers that want it to read on, though it rests or is held.
    reading_on: u32,
    events: VecDeque<Event>,
    /// Whether content read now belongs to the next pass, and that content.
    aside: bool,
    late: Vec<Event>,
    end: Option<End>,
    prelude: Option<Prelude>,
    pages_read: u64,
    kept: BTreeMap<(usize, u64), Option<Box<Page>>>,
}

/// State shared by the thread, the pacing task and the owner.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    reader: Condvar,
    /// Wakes tasks that wait for the reader to rest or end.
    rested: Notify,
    /// Wakes tasks that wait for an event.
    pub(crate) event: Notify,
}

impl Shared {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                mode: Mode::Run(Goal::Prelude),
                orders: 0,
                busy: true,
                held: false,
                reading_on: 0,
                events: VecDeque::new(),
                aside: false,
                late: Vec::new(),
                end: None,
                prelude: None,
                pages_read: 0,
                kept: BTreeMap::new(),
            }),
            reader: Condvar::new(),
            rested: Notify::new(),
            event: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent whenever the lock is free.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, mode: Mode) {
        let mut state = self.lock();
        let fits = match state.mode {
            Mode::Rest | Mode::Run(_) => true,
            // Only this takes back a reader that reads to the end.
            Mode::Flush => matches!(mode, Mode::Quit),
            Mode::Quit => false,
        };
        if state.end.is_none() && fits {
            state.mode = mode;
            state.orders += 1;
        }
        drop(state);
        self.reader.notify_all();
    }

    /// Reads on until the value is dropped, though the reader rests or is held. Pages read in a
    /// rest are reported with the next pass.
    pub(crate) fn read_on(&self) -> ReadingOn<'_> {
        let mut state = self.lock();
        state.reading_on += 1;
        state.aside |= matches!(state.mode, Mode::Rest);
        drop(state);
        self.reader.notify_all();
        ReadingOn(self)
    }

    /// Reads until the goal.
    pub(crate) fn run(&self, goal: Goal) {
        self.set(Mode::Run(goal));
    }

    /// Reads on while a pass is held: the content is reported with the next one.
    pub(crate) fn run_aside(&self) {
        self.lock().aside = true;
        self.run(Goal::Open);
    }

    /// Stops reading.
    pub(crate) fn rest(&self) {
        self.set(Mode::Rest);
    }

    /// Reads to the end, whether or not the owner takes events.
    pub(crate) fn flush(&self) {
        self.lock().held = false;
        self.set(Mode::Flush);
    }

    /// Ends the thread.
    pub(crate) fn quit(&self) {
        self.set(Mode::Quit);
    }

    /// Holds the reader, or lets it go on.
    pub(crate) fn hold(&self, held: bool) {
        self.lock().held = held;
        self.reader.notify_all();
    }

    /// Returns whether the owner holds the reader.
    pub(crate) fn is_held(&self) -> bool {
        self.lock().held
    }

    /// Returns whether the reader rests; the end counts as rest.
    pub(crate) fn is_resting(&self) -> bool {
        let state = self.lock();
        state.end.is_some() || (matches!(state.mode, Mode::Rest) && !state.busy)
    }

    /// Waits until the reader rests.
    pub(crate) async fn rests(&self) {
        loop {
            let rested = self.rested.notified();
            tokio::pin!(rested);
            rested.as_mut().enable();
            if self.is_resting() {
                return;
            }
            rested.await;
        }
    }

    /// Returns how the stream ended; `None` while it has not.
    pub(crate) fn end(&self) -> Option<End> {
        self.lock().end.clone()
    }

    /// Waits until the stream has ended.
    pub(crate) async fn ended(&self) -> End {
        loop {
            let rested = self.rested.notified();
            tokio::pin!(rested);
            rested.as_mut().enable();
            if let Some(end) = self.end() {
                return end;
            }
            rested.await;
        }
    }

    /// Returns the prelude, once it is there.
    pub(crate) fn prelude(&self) -> Option<Prelude> {
        self.lock().prelude.clone()
    }

    /// Returns the number of records read so far.
    pub(crate) fn pages_read(&self) -> u64 {
        self.lock().pages_read
    }

    /// Returns the oldest event that was not taken.
    pub(crate) fn take_event(&self) -> Option<Event> {
        let event = self.lock().events.pop_front();
        self.reader.notify_all();
        event
    }

    /// Returns all blocks reported written and not taken.
    pub(crate) fn take_written(&self) -> Vec<Written> {
        let mut state = self.lock();
        let late = std::mem::take(&mut state.late);
        let events = std::mem::take(&mut state.events).into_iter().chain(late);
        let written = events.filter_map(|event| match event {
            Event::Written(written) => Some(written),
            _ => None,
        });
        written.collect()
    }

    /// Returns the content of the kept blocks' pages so far.
    pub(crate) fn kept(&self) -> BTreeMap<(usize, u64), Option<Box<Page>>> {
        self.lock().kept.clone()
    }

    /// Returns the newest content of the kept blocks' pages.
    pub(crate) fn take_kept(&self) -> BTreeMap<(usize, u64), Option<Box<Page>>> {
        std::mem::take(&mut self.lock().kept)
    }

    /// Sends the owner an event, after those of the reader.
    pub(crate) fn tell(&self, event: Event) {
        self.lock().events.push_back(event);
        self.event.notify_waiters();
    }

    /// Reports to the owner that a pass begins, and the part of it that was read before.
    pub(crate) fn begin_pass(&self, pass: u64) {
        let mut state = self.lock();
        state.aside = false;
        let late = std::mem::take(&mut state.late);
        state.events.push_back(Event::PassStarted { pass });
        state.events.extend(late);
        drop(state);
        self.event.notify_waiters();
    }

    /// Ends the run with this order's number.
    fn reached(&self, order: u64) {
        let mut state = self.lock();
        if state.orders == order {
            state.mode = Mode::Rest;
        }
    }

    fn finish(&self, end: End) {
        self.lock().end = Some(end);
        self.rested.notify_waiters();
        self.event.notify_waiters();
    }

    /// Waits until there is something to read for, and returns the goal, if there is one, and the
    /// order's number; `None` when the thread shall end.
    fn wait_for_work(&self) -> Option<(Option<Goal>, u64)> {
        let mut state = self.lock();
        loop {
            let full = state.events.len() >= EVENTS_MAX;
            let reading_on = state.reading_on > 0;
            let goal = match state.mode {
                Mode::Quit => return None,
                Mode::Flush => Some(None),
                // The end of a pass is short, and the reader cannot rest there.
                Mode::Run(Goal::NextPass) => Some(Some(Goal::NextPass)),
                Mode::Run(goal) if (!full && !state.held) || reading_on => Some(Some(goal)),
                Mode::Rest if reading_on => Some(None),
                Mode::Run(_) | Mode::Rest => None,
            };
            state.busy = goal.is_some();
            if let Some(goal) = goal {
                return Some((goal, state.orders));
            }
            self.rested.notify_waiters();
            state = self
                .reader
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Makes the reader read on while it exists.
pub(crate) struct ReadingOn<'a>(&'a Shared);

impl Drop for ReadingOn<'_> {
    fn drop(&mut self) {
        self.0.lock().reading_on -= 1;
        self.0.reader.notify_all();
    }
}

/// Reads one stream, in a thread of its own.
pub(crate) struct Reader {
    shared: Arc<Shared>,
    socket: UnixStream,
    memory: Arc<GuestMemory>,
    parser: Parser,
    buffer: Vec<u8>,
    /// The range of the buffer that is not parsed yet.
    unparsed: std::ops::Range<usize>,
    /// The stream's blocks: their indices in the guest's memory, and whether they are kept.
    blocks: Vec<(usize, bool)>,
    runs: Option<Written>,
    pages: u64,
    pages_in_section: u64,
    /// The current order, and the pages and pass when it began.
    order: Option<(u64, u64, u64)>,
}

impl Reader {
    /// Starts the thread.
    pub(crate) fn start(
        shared: Arc<Shared>,
        socket: UnixStream,
        memory: Arc<GuestMemory>,
    ) -> std::io::Result<()> {
        let reader = Self {
            shared,
            socket,
            memory,
            parser: Parser::new(stream::Limits::default()),
            buffer: vec![0; READ_BYTES],
            unparsed: 0..0,
            blocks: Vec::new(),
            runs: None,
            pages: 0,
            pages_in_section: 0,
            order: None,
        };
        let name = "qemu-stream".to_owned();
        std::thread::Builder::new()
            .name(name)
            .spawn(|| reader.run())?;
        Ok(())
    }

    fn run(mut self) {
        while let Some((goal, order)) = self.shared.wait_for_work() {
            if self.order.is_none_or(|(known, ..)| known != order) {
                self.order = Some((order, self.pages, self.parser.pass()));
            }
            let result = self.read_some(goal);
            // Everything read is reported before the reader is seen to rest.
            if !matches!(result, Ok(Step::On)) {
                self.tell_runs();
            }
            match result {
                Ok(Step::On) => {}
                Ok(Step::Goal) => self.shared.reached(order),
                Ok(Step::Complete(state)) => return self.shared.finish(End::Complete(state)),
                Err(error) => return self.shared.finish(End::Failed(error)),
            }
        }
    }

    /// Parses the available bytes, or waits for more.
    fn read_some(&mut self, goal: Option<Goal>) -> Result<Step, ReadError> {
        if self.unparsed.is_empty() {
            self.tell_runs();
            if !self.fill(goal)? {
                return Ok(Step::On);
            }
        }
        self.parse(goal)
    }

    /// Reads from the socket; returns false when no bytes arrived for a while.
    fn fill(&mut self, goal: Option<Goal>) -> Result<bool, ReadError> {
        let system = |error: std::io::Error| ReadError::System(error.to_string());
        let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::from(PATIENCE_MS)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => return Ok(false),
            Ok(_) => {}
            Err(errno) => return Err(system(errno.into())),
        }
        let limit = match goal {
            Some(Goal::NextPass) => READ_BYTES_AT_END,
            _ => READ_BYTES,
        };
        let room = self.buffer.get_mut(..limit).unwrap_or_default();
        match self.socket.read(room) {
            Ok(0) => Err(ReadError::Closed),
            Ok(length) => {
                self.unparsed = 0..length;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(false),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Err(ReadError::Closed),
            Err(error) => Err(system(error)),
        }
    }

    fn parse(&mut self, goal: Option<Goal>) -> Result<Step, ReadError> {
        let buffer = std::mem::take(&mut self.buffer);
        let mut input = buffer.get(self.unparsed.clone()).unwrap_or_default();
        let end = self.unparsed.end;
        let mut result = Ok(Step::On);
        loop {
            match self.parser.next(&mut input) {
                Ok(None) => break,
                Ok(Some(event)) => match self.take(event, goal) {
                    Ok(Step::On) => {}
                    other => {
                        result = other;
                        break;
                    }
                },
                Err(error) => {
                    result = Err(error.into());
                    break;
                }
            }
        }
        self.unparsed = end - input.len()..end;
        self.buffer = buffer;
        result
    }

    fn take(&mut self, event: stream::Event, goal: Option<Goal>) -> Result<Step, ReadError> {
        match event {
            stream::Event::Prelude(prelude) => {
                self.know_blocks(&prelude)?;
                self.shared.lock().prelude = Some(prelude);
                Ok(Step::goal_if(goal == Some(Goal::Prelude)))
            }
            stream::Event::SectionStart { .. } => {
                self.pages_in_section = 0;
                Ok(Step::On)
            }
            stream::Event::Page {
                block,
                page,
                content,
            } => {
                self.pages += 1;
                self.pages_in_section += 1;
                self.written(block, page, content);
                Ok(Step::goal_if(self.is_reached(goal, (block, page))))
            }
            stream::Event::SectionEnd => {
                if self.pages_in_section == 0 && goal == Some(Goal::NextPass) {
                    // QEMU queries dirty pages before each of these; it need not do so often.
                    std::thread::sleep(EMPTY_SECTION_PAUSE);
                }
                Ok(Step::On)
            }
            stream::Event::Ping(_) | stream::Event::SwitchoverStart => Ok(Step::On),
            stream::Event::DeviceState(bytes) => Ok(Step::Complete(bytes)),
        }
    }

    fn is_reached(&self, goal: Option<Goal>, at: (usize, u64)) -> bool {
        let (_, pages, pass) = self.order.unwrap_or_default();
        match goal {
            None | Some(Goal::Prelude | Goal::Open) => false,
            Some(Goal::Place { block, page }) => at >= (block, page),
            Some(Goal::Pages(wanted)) => self.pages - pages >= wanted,
            Some(Goal::NextPass) => self.parser.pass() > pass,
        }
    }

    fn know_blocks(&mut self, prelude: &Prelude) -> Result<(), ReadError> {
        for (index, block) in prelude.blocks.iter().enumerate() {
            let known = self.memory.find(&block.name);
            let known = known.and_then(|at| Some((at, self.memory.blocks().get(at)?)));
            let Some((at, known)) = known.filter(|(_, known)| known.used_bytes == block.used_bytes)
            else {
                return Err(ReadError::Block(block.name.clone()));
            };
            if known.is_kept() {
                self.parser.keep(index);
            }
            self.blocks.push((at, known.is_kept()));
        }
        Ok(())
    }

    /// Records a written page.
    fn written(&mut self, index: usize, page: u64, content: Content) {
        let Some((block, kept)) = self.blocks.get(index).copied() else {
            return;
        };
        if kept {
            let content = match content {
                Content::Kept(content) => Some(content),
                Content::Zero | Content::Skipped => None,
            };
            // Destinations get pages by the stream's own block numbers.
            self.shared.lock().kept.insert((index, page), content);
            return;
        }
        if let Some(written) = &mut self.runs
            && written.block == block
            && written.runs.len() < RUNS_MAX
        {
            match written.runs.last_mut() {
                Some(last) if last.end() == page => last.count += 1,
                _ => written.runs.push(BlockRange::new(page, 1)),
            }
            return;
        }
        self.tell_runs();
        self.runs = Some(Written {
            block,
            runs: vec![BlockRange::new(page, 1)],
        });
    }

    fn tell_runs(&mut self) {
        let mut state = self.shared.lock();
        state.pages_read = self.pages;
        match self.runs.take().map(Event::Written) {
            Some(written) if state.aside => state.late.push(written),
            Some(written) => {
                state.events.push_back(written);
                drop(state);
                self.shared.event.notify_waiters();
            }
            None => {}
        }
    }
}

enum Step {
    On,
    Goal,
    Complete(Vec<u8>),
}

impl Step {
    fn goal_if(reached: bool) -> Self {
        match reached {
            true => Self::Goal,
            false => Self::On,
        }
    }
}
