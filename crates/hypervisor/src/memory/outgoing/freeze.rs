//! Stops a guest without losing any of its writes, in a state from which no event can wake it.

use super::guard::{ANSWER_PATIENCE, is_completing, is_stop};
use super::pace::{blocking, wait_for_end};
use super::{
    FINISH_TIMEOUT, Frozen, Migration, OutgoingError, POLL, STILLNESS, STOP_TIMEOUT, Written,
};
use crate::memory::reader::End;
use crate::memory::source::{run_state, set_parameters};
use longhaul_qemu_stream::return_path::Message;
use longhaul_qemu_stream::{Page, Writer};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest downtime that QEMU accepts, in milliseconds.
const DOWNTIME_LIMIT_MAX: u64 = 2_000_000;
/// The number of bytes in the socket from which QEMU is assumed to wait for room.
const QUEUED_BYTES_MIN: u64 = 100_000;
/// How long `stop` may take before QEMU's stream is read on.
const STOP_PATIENCE: Duration = Duration::from_secs(1);
/// How long QEMU may take to process its new limits before its stream is read.
const LET_GO_PATIENCE: Duration = Duration::from_millis(20);

impl Migration {
    /// Freezes the guest, in the order that `stop`, SHUT and `postmigrate` must have.
    pub(super) async fn freeze(&self) -> Result<Frozen, OutgoingError> {
        let (shared, qmp) = (self.shared(), self.qmp());
        // The destination was told that the guest runs.
        if self.before.running && self.answered(run_state(qmp), ANSWER_PATIENCE).await? == "paused"
        {
            return Err(OutgoingError::Paused);
        }
        shared.rest();
        shared.rests().await;
        if let Some(End::Failed(error)) = shared.end() {
            return Err(error.into());
        }
        let must_be_paused = self.before.running && self.may_complete();
        if must_be_paused {
            // It writes nothing more, so it cannot complete between here and `stop`.
            let still = self.waits().await || self.is_still().await?;
            if !still || self.completes().await {
                self.restart().await?;
                return Err(OutgoingError::Restarted);
            }
        }
        let stopped_at = Instant::now();
        if self.before.running {
            self.inner().stop_ordered = true;
            self.stop().await?;
            let state = self.answered(run_state(qmp), ANSWER_PATIENCE).await?;
            if must_be_paused && is_completing(&state) {
                self.restart().await?;
                return Err(OutgoingError::Restarted);
            }
            if state != "paused" && !is_completing(&state) {
                return Err(OutgoingError::State {
                    expected: "paused",
                    found: state,
                });
            }
        }
        let stop_time = stopped_at.elapsed();
        // Concurrently, since the guest is stopped.
        let (state, set, changed) =
            tokio::join!(wait_for_end(&shared), self.let_go(), self.changed());
        let (state, changed) = (state?, changed?);
        set?;
        let read_time = stopped_at.elapsed() - stop_time;
        self.send(&Message::Shut(0))?;
        self.wait_for_postmigrate().await?;
        Ok(Frozen {
            written: shared.take_written(),
            changed,
            tail: self.tail(&shared.take_kept(), &state),
            was_running: self.before.running,
            stop_time,
            read_time,
            finish_time: stopped_at.elapsed() - stop_time - read_time,
            stopped_at,
        })
    }

    async fn stop(&self) -> Result<(), OutgoingError> {
        let stop = self.qmp().execute("stop", json!({}), STOP_TIMEOUT);
        self.patiently(stop).await?;
        Ok(())
    }

    /// Waits for an answer of QEMU. A QEMU that has just begun to complete by itself blocks in a
    /// write with its big lock held, and processes no command until that is read: then it has
    /// stopped the guest. It may still have processed `stop` on its way there, and then answers no
    /// later query.
    async fn patiently<T>(&self, answer: impl Future<Output = T>) -> T {
        let mut events = self.qmp().events();
        let stopped = async {
            // The end of the events means nothing for the guest.
            while events.recv().await.is_ok_and(|event| !is_stop(&event)) {}
            tokio::time::sleep(ANSWER_PATIENCE).await;
        };
        tokio::pin!(answer);
        tokio::select! {
            biased;
            answer = &mut answer => return answer,
            () = stopped => {}
            () = tokio::time::sleep(STOP_PATIENCE) => {}
        }
        self.shared().flush();
        answer.await
    }

    /// Gives QEMU everything that it needs to complete, and waits until it has.
    pub(super) async fn complete_early(&self) -> Result<(), OutgoingError> {
        set_parameters(self.qmp(), 0, DOWNTIME_LIMIT_MAX).await?;
        if !self.may_complete() {
            self.send(&Message::SwitchoverAck)?;
        }
        self.shared().flush();
        let start = Instant::now();
        while !is_completing(&run_state(self.qmp()).await?) {
            if start.elapsed() > FINISH_TIMEOUT {
                return Err(OutgoingError::Timeout {
                    what: "complete by itself",
                    waited: FINISH_TIMEOUT,
                });
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Returns whether QEMU waits for its socket to be read: much is in it, and nothing more
    /// arrives.
    async fn waits(&self) -> bool {
        let before = self.queued_bytes();
        tokio::time::sleep(STILLNESS).await;
        let after = self.queued_bytes();
        before == after && after >= QUEUED_BYTES_MIN
    }

    /// Returns the number of bytes that QEMU wrote and that are unread.
    fn queued_bytes(&self) -> u64 {
        let inner = self.inner();
        rustix::io::ioctl_fionread(&inner.socket).unwrap_or(0)
    }

    /// Lets QEMU write everything, as fast as it can.
    async fn let_go(&self) -> Result<(), OutgoingError> {
        let set = set_parameters(self.qmp(), 0, DOWNTIME_LIMIT_MAX);
        tokio::pin!(set);
        // A QEMU that blocks in a write gets these before it checks its limits again and sleeps.
        let early = tokio::time::timeout(LET_GO_PATIENCE, &mut set).await;
        self.shared().flush();
        match early {
            Ok(set) => set?,
            Err(_) => set.await?,
        }
        Ok(())
    }

    /// Returns the guest's writes, where QEMU does not see all of them.
    async fn changed(&self) -> Result<Vec<Written>, OutgoingError> {
        if !self.before.misses_writes {
            return Ok(Vec::new());
        }
        let memory = Arc::clone(&self.memory);
        let began = Instant::now();
        let changed = blocking(move || memory.changed_since_read()).await?;
        tracing::debug!(took = ?began.elapsed(), "compared the RAM of a stopped guest");
        let changed = changed.into_iter().filter(|(_, runs)| !runs.is_empty());
        Ok(changed
            .map(|(block, runs)| Written { block, runs })
            .collect())
    }

    async fn wait_for_postmigrate(&self) -> Result<(), OutgoingError> {
        let start = Instant::now();
        loop {
            match run_state(self.qmp()).await?.as_str() {
                "postmigrate" => return Ok(()),
                "running" => {
                    return Err(OutgoingError::State {
                        expected: "postmigrate",
                        found: "running".to_owned(),
                    });
                }
                _ if start.elapsed() > FINISH_TIMEOUT => {
                    return Err(OutgoingError::Timeout {
                        what: "end its migration",
                        waited: FINISH_TIMEOUT,
                    });
                }
                _ => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Returns the kept blocks in a section of their own.
    pub(super) fn kept_section(&self, kept: &BTreeMap<(usize, u64), Option<Box<Page>>>) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = Writer::new(&self.prelude);
        writer.section_start(false, &mut out);
        for ((block, page), content) in kept {
            // These are from this stream, so the pages exist.
            writer.page(*block, *page, content.as_deref(), &mut out);
        }
        writer.section_end(&mut out);
        out
    }

    /// Returns the kept blocks, the last section and the devices.
    fn tail(&self, kept: &BTreeMap<(usize, u64), Option<Box<Page>>>, state: &[u8]) -> Vec<u8> {
        let mut out = self.kept_section(kept);
        let writer = Writer::new(&self.prelude);
        writer.section_start(true, &mut out);
        writer.section_end(&mut out);
        out.extend_from_slice(state);
        out
    }
}
