//! Implements the task that reads pass after pass and never lets QEMU complete by itself.

use super::guard::{ANSWER_PATIENCE, is_completing, is_stop};
use super::{
    ASK_EVERY, BANDWIDTH_AT_END, BANDWIDTH_NONE, DIRTY_PAGES_MIN, ESTIMATE_EVERY, Event,
    FINISH_TIMEOUT, MARGIN_PAGES, Migration, OutgoingError, POLL, Wish, connect,
};
use crate::memory::reader::{End, Goal, Shared};
use crate::memory::sampler::Sample;
use crate::memory::source::{self, run_state, set_bandwidth};
use crate::qmp::{self, Qmp};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_qemu_stream::return_path::Message;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{broadcast, watch};

/// The time limit for a QEMU that seems to complete to write its devices.
const STATE_TIMEOUT: Duration = Duration::from_secs(2);

/// The period in which a QEMU that is held by its rate sleeps for most of the time: 100 ms.
const SLEEPS_WITHIN: Duration = Duration::from_millis(20);

/// Why the reader rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The goal was reached.
    Goal,
    /// QEMU has begun a new pass.
    Pass,
    /// The owner ordered the task to end.
    Told,
    /// QEMU completes by itself.
    Completes,
}

/// QEMU's report of its pass.
#[derive(Debug, Clone, Copy)]
struct Pass {
    syncs: u64,
    remaining_pages: u64,
}

impl Migration {
    /// Paces until it is ordered to end or an operation fails.
    pub(super) async fn pace(self: Arc<Self>, mut wishes: watch::Receiver<Wish>) {
        loop {
            let paced = match self.before.running {
                true => self.pace_one_life(&mut wishes).await,
                false => self.read_paused(&mut wishes).await,
            };
            match paced {
                Ok(Stop::Completes) => match self.completed_by_itself().await {
                    Ok(()) => {}
                    Err(error) => return self.shared().tell(Event::Failed(error.to_string())),
                },
                Ok(_) => return,
                Err(error) => return self.shared().tell(Event::Failed(error.to_string())),
            }
        }
    }

    /// Paces one migration from the first pass on, until ordered to end or QEMU completes.
    async fn pace_one_life(
        &self,
        wishes: &mut watch::Receiver<Wish>,
    ) -> Result<Stop, OutgoingError> {
        let mut events = self.qmp.events();
        let first_goal = self.inner().first_goal;
        let mut pass = 1;
        let Some(mut known) = self.ask().await? else {
            return Ok(Stop::Completes);
        };
        let mut goal = first_goal;
        let mut unread_pages = self.pages_from(first_goal);
        loop {
            self.begin_pass(pass);
            let sample = self.sample().await?;
            if let Some(readable) = goal {
                match self.run(readable, known.syncs, wishes, &mut events).await? {
                    Stop::Goal => {}
                    Stop::Pass => {
                        let Some(begun) = self.look_at_pass().await? else {
                            return Ok(Stop::Completes);
                        };
                        (known, goal, unread_pages) = begun;
                        pass += 1;
                        continue;
                    }
                    stop => return Ok(stop),
                }
            }
            self.inner().progress.unread_pages = Some(unread_pages);
            if self.before.holds_by_rate() {
                self.hold_by_rate().await?;
            }
            self.shared().tell(Event::Held { pass, unread_pages });
            match self
                .wait_for_wish(pass, &sample, wishes, &mut events)
                .await?
            {
                Stop::Goal => {}
                stop => return Ok(stop),
            }
            // QEMU may have queried dirty pages since, more than once, before it blocked: only a
            // query from now on is a pass.
            let Some(now) = self.ask().await? else {
                return Ok(Stop::Completes);
            };
            if self.may_complete() {
                set_bandwidth(&self.qmp, BANDWIDTH_AT_END).await?;
            } else if self.before.holds_by_rate() {
                set_bandwidth(&self.qmp, 0).await?;
            }
            let stop = self
                .run(Goal::NextPass, now.syncs, wishes, &mut events)
                .await?;
            if stop == Stop::Completes {
                return Ok(stop);
            }
            let Some(begun) = self.look_at_pass().await? else {
                return Ok(Stop::Completes);
            };
            (known, goal, unread_pages) = begun;
            pass += 1;
        }
    }

    /// Reads the whole stream of a guest that does not run: QEMU completes at any time, and with
    /// its big lock held, but there are no writes that it could miss.
    async fn read_paused(&self, wishes: &mut watch::Receiver<Wish>) -> Result<Stop, OutgoingError> {
        self.begin_pass(1);
        let shared = self.shared();
        shared.flush();
        let mut told = false;
        loop {
            let wish = *wishes.borrow_and_update();
            if wish.end {
                return Ok(Stop::Told);
            }
            tokio::select! {
                end = shared.ended(), if !told => match end {
                    End::Failed(error) => return Err(error.into()),
                    End::Complete(_) => {
                        told = true;
                        let unread_pages = 0;
                        shared.tell(Event::Held { pass: 1, unread_pages });
                    }
                },
                changed = wishes.changed() => if changed.is_err() {
                    return Ok(Stop::Told);
                },
            }
        }
    }

    /// Halts at the beginning of a pass, and determines how much of it can be read; returns `None`
    /// when QEMU completes.
    async fn look_at_pass(&self) -> Result<Option<(Pass, Option<Goal>, u64)>, OutgoingError> {
        let shared = self.shared();
        // The reader goes on meanwhile if it has not reached the pass: if QEMU completes, it
        // answers only when its stream is read.
        if self.may_complete() && !self.is_still().await? {
            return Ok(None);
        }
        shared.rest();
        shared.rests().await;
        if let Some(end) = shared.end() {
            return self.ended(end).map(|_| None);
        }
        let Some(pass) = self.ask().await? else {
            return Ok(None);
        };
        let readable = pass.remaining_pages.saturating_sub(MARGIN_PAGES);
        if readable == 0 {
            return Ok(Some((pass, None, pass.remaining_pages)));
        }
        if self.may_complete() {
            set_bandwidth(&self.qmp, 0).await?;
        }
        Ok(Some((pass, Some(Goal::Pages(readable)), MARGIN_PAGES)))
    }

    /// Limits QEMU's rate to almost nothing, and reads that.
    async fn hold_by_rate(&self) -> Result<(), OutgoingError> {
        self.shared().run_aside();
        set_bandwidth(&self.qmp, BANDWIDTH_NONE).await?;
        Ok(())
    }

    /// Waits until QEMU sleeps because of its rate, with no lock held, at any place in a pass.
    pub(super) async fn settle(&self) -> Result<(), OutgoingError> {
        self.hold_by_rate().await?;
        let start = Instant::now();
        let mut read = self.shared().pages_read();
        while start.elapsed() < STATE_TIMEOUT {
            tokio::time::sleep(SLEEPS_WITHIN).await;
            let now = self.shared().pages_read();
            if now == read {
                break;
            }
            read = now;
        }
        Ok(())
    }

    /// Prevents QEMU from writing pages, and so from completing; returns false when it completes
    /// already.
    pub(super) async fn is_still(&self) -> Result<bool, OutgoingError> {
        let set = set_bandwidth(&self.qmp, BANDWIDTH_NONE);
        self.answered(set, ANSWER_PATIENCE).await?;
        Ok(!self.completes().await)
    }

    /// Reads until the goal is reached or another stop condition occurs; then the reader rests.
    async fn run(
        &self,
        goal: Goal,
        syncs: u64,
        wishes: &mut watch::Receiver<Wish>,
        events: &mut broadcast::Receiver<qmp::Event>,
    ) -> Result<Stop, OutgoingError> {
        let shared = self.shared();
        // Pages that QEMU finds dirty in the middle of a pass only add to its number: the goal
        // stays right.
        let looks_are_passes = !self.before.looks_within_passes || goal == Goal::NextPass;
        shared.run(goal);
        loop {
            // Queried again in each round: a wish may have arrived while the end of a pass was
            // read.
            let told = wishes.has_changed().is_err() || wishes.borrow_and_update().end;
            // The reader cannot rest at the end of a pass.
            if told && goal != Goal::NextPass {
                shared.rest();
                shared.rests().await;
                return Ok(Stop::Told);
            }
            let happened = tokio::select! {
                () = shared.rests() => Happened::Rest,
                _ = wishes.changed(), if !told => Happened::Wish,
                event = events.recv() => Happened::of(event),
                () = tokio::time::sleep(ASK_EVERY) => Happened::Time,
            };
            if let Some(end) = shared.end() {
                return self.ended(end);
            }
            match happened {
                Happened::Rest => return Ok(Stop::Goal),
                Happened::Stop if self.completes().await => return Ok(Stop::Completes),
                Happened::Pass | Happened::Time => match self.ask().await? {
                    Some(pass) if looks_are_passes && pass.syncs > syncs => return Ok(Stop::Pass),
                    Some(_) => {}
                    None => return Ok(Stop::Completes),
                },
                _ => {}
            }
        }
    }

    /// Waits, held, until the next pass is wanted and possible; keeps the estimate current.
    async fn wait_for_wish(
        &self,
        pass: u64,
        sample: &Arc<Sample>,
        wishes: &mut watch::Receiver<Wish>,
        events: &mut broadcast::Receiver<qmp::Event>,
    ) -> Result<Stop, OutgoingError> {
        let enough = if self.may_complete() {
            DIRTY_PAGES_MIN
        } else {
            1
        };
        loop {
            let wish = *wishes.borrow_and_update();
            if wish.end {
                return Ok(Stop::Told);
            }
            let dirty = self.estimate(sample).await?;
            let wanted = wish.life == self.inner().life && wish.passes > pass;
            if wanted && dirty >= enough {
                return Ok(Stop::Goal);
            }
            let happened = tokio::select! {
                changed = wishes.changed() => match changed {
                    Ok(()) => Happened::Wish,
                    Err(_) => return Ok(Stop::Told),
                },
                event = events.recv() => Happened::of(event),
                () = tokio::time::sleep(ESTIMATE_EVERY) => Happened::Time,
            };
            // The events may have been lost, so it also asks periodically.
            let ask = self.may_complete() && happened == Happened::Time;
            if (ask || happened == Happened::Stop) && self.completes().await {
                return Ok(Stop::Completes);
            }
            if self.qmp.is_closed() {
                // The next command reports the reason.
                run_state(&self.qmp).await?;
            }
        }
    }

    /// Returns how many pages were dirtied since the sample was taken; counted again periodically.
    async fn estimate(&self, sample: &Arc<Sample>) -> Result<u64, OutgoingError> {
        let known = self.inner().dirty;
        if let Some((pages, at)) = known
            && at.elapsed() < ESTIMATE_EVERY
        {
            return Ok(pages);
        }
        let (memory, sample) = (Arc::clone(&self.memory), Arc::clone(sample));
        let at = Instant::now();
        let pages = blocking(move || sample.changed_blocks(&memory)).await?;
        self.inner().dirty = Some((pages, at));
        Ok(pages)
    }

    fn ended(&self, end: End) -> Result<Stop, OutgoingError> {
        match end {
            End::Failed(error) => Err(error.into()),
            End::Complete(_) => Ok(Stop::Completes),
        }
    }

    /// Returns whether QEMU has stopped the guest in order to complete.
    pub(super) async fn completes(&self) -> bool {
        let state = self.answered(run_state(&self.qmp), ANSWER_PATIENCE).await;
        state.is_ok_and(|state| is_completing(&state))
    }

    fn begin_pass(&self, pass: u64) {
        let mut inner = self.inner();
        inner.progress.pass = pass;
        inner.progress.unread_pages = None;
        inner.dirty = None;
        inner.shared.begin_pass(pass);
    }

    async fn sample(&self) -> Result<Arc<Sample>, OutgoingError> {
        let memory = Arc::clone(&self.memory);
        Ok(Arc::new(blocking(move || Sample::take(&memory)).await?))
    }

    /// Returns the number of pages of the first pass from this place on.
    fn pages_from(&self, goal: Option<Goal>) -> u64 {
        let (block, page) = match goal {
            Some(Goal::Place { block, page }) => (block, page),
            _ => (0, 0),
        };
        let rest = self.prelude.blocks.iter().skip(block);
        let pages: u64 = rest.map(|block| block.pages()).sum();
        pages.saturating_sub(page)
    }

    /// Queries QEMU's pass; `None` when it is completing.
    async fn ask(&self) -> Result<Option<Pass>, OutgoingError> {
        let start = Instant::now();
        loop {
            let asked = self.qmp.query("query-migrate");
            let migration = self.answered(asked, ANSWER_PATIENCE).await?;
            // It has written its devices, and was read meanwhile.
            if matches!(self.shared().end(), Some(End::Complete(_))) {
                return Ok(None);
            }
            let number = |name: &str| migration["ram"][name].as_u64();
            // In its state `setup` QEMU writes the prelude and has no numbers yet.
            if let (Some(syncs), Some(remaining)) =
                (number("dirty-sync-count"), number("remaining"))
                && migration["status"] != "setup"
            {
                let slowed = migration["cpu-throttle-percentage"].as_u64();
                let slowed = slowed.and_then(|percent| u8::try_from(percent).ok());
                self.inner().progress.slowed_percent = slowed.filter(|percent| *percent > 0);
                return Ok(Some(Pass {
                    syncs,
                    remaining_pages: remaining / BLOCK_SIZE as u64,
                }));
            }
            let status = migration["status"].as_str().unwrap_or("none");
            if source::is_over(status) {
                return Err(OutgoingError::Failed(format!(
                    "QEMU's migration is `{status}`"
                )));
            }
            if start.elapsed() > FINISH_TIMEOUT {
                return Err(OutgoingError::Timeout {
                    what: "begin its first pass",
                    waited: FINISH_TIMEOUT,
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Handles a QEMU that has completed by itself: begins another migration where that was to be
    /// expected, and gives up elsewhere.
    async fn completed_by_itself(&self) -> Result<(), OutgoingError> {
        if self.may_complete() {
            return self.restart().await;
        }
        self.refuse().await?;
        Err(OutgoingError::NotHeld {
            version: self.qmp.version(),
        })
    }

    /// Refuses a stream that QEMU ended by itself, and begins another.
    pub(super) async fn restart(&self) -> Result<(), OutgoingError> {
        self.refuse().await?;
        let shared = self.shared();
        let path = self.path.as_path();
        let begun = connect(&*self.by, &self.qmp, &self.before, &self.memory, path).await?;
        let (mut inner, prelude) = begun;
        if prelude != self.prelude {
            inner.shared.quit();
            return Err(OutgoingError::Failed(
                "QEMU's machine is not what it was when the move began".to_owned(),
            ));
        }
        inner.shared.hold(shared.is_held());
        inner.shared.tell(Event::Restarted);
        {
            let mut old = self.inner();
            inner.life = old.life + 1;
            *old = inner;
        }
        self.replaced.notify_waiters();
        Ok(())
    }

    /// Refuses a stream that QEMU ended by itself; the guest runs on.
    async fn refuse(&self) -> Result<(), OutgoingError> {
        let shared = self.shared();
        shared.flush();
        if let Ok(Ok(_)) = tokio::time::timeout(STATE_TIMEOUT, wait_for_end(&shared)).await {
            self.send(&Message::Shut(1))?;
        }
        // Otherwise it did not complete; the end of the socket has the same effect.
        shared.quit();
        self.close();
        self.by.resume(&self.qmp, self.continuation()).await?;
        Ok(())
    }

    /// Writes to the return path.
    pub(super) fn send(&self, message: &Message) -> Result<(), OutgoingError> {
        let mut bytes = Vec::new();
        message.write(&mut bytes);
        let written = (&self.inner().socket).write_all(&bytes);
        written.map_err(|error| OutgoingError::Failed(format!("return path: {error}")))
    }

    pub(super) fn qmp(&self) -> &Qmp {
        &self.qmp
    }
}

/// Waits until the stream has ended, and returns the device state.
pub(super) async fn wait_for_end(shared: &Shared) -> Result<Vec<u8>, OutgoingError> {
    let ended = tokio::time::timeout(FINISH_TIMEOUT, shared.ended());
    match ended.await {
        Ok(End::Complete(state)) => Ok(state),
        Ok(End::Failed(error)) => Err(error.into()),
        Err(_) => Err(OutgoingError::Timeout {
            what: "write the rest of its stream",
            waited: FINISH_TIMEOUT,
        }),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Happened {
    Rest,
    Wish,
    /// QEMU has queried its dirty pages.
    Pass,
    /// The guest was stopped.
    Stop,
    Time,
    Other,
}

impl Happened {
    fn of(event: Result<qmp::Event, broadcast::error::RecvError>) -> Self {
        match event {
            Ok(event) if event.name == "MIGRATION_PASS" => Self::Pass,
            Ok(event) if is_stop(&event) => Self::Stop,
            Ok(_) => Self::Other,
            Err(_) => Self::Time,
        }
    }
}

/// Runs a function that reads much of the guest's RAM.
pub(super) async fn blocking<T: Send + 'static, E: Into<OutgoingError> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, OutgoingError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| OutgoingError::Failed(error.to_string()))?
        .map_err(Into::into)
}
