//! Takes up what an earlier agent left: every journal that is not at an end is brought to one.
//!
//! | the journal's last word | here the source | here the destination |
//! |---|---|---|
//! | Began | the guest goes on here; ABORTED | QEMU is ended; ABORTED |
//! | Ready | | QEMU is ended; ABORTED: nothing was committed |
//! | Released | the destination is asked until it answers | |
//! | Committed | | the guest is told to run, again |

use super::Context;
use super::entry::{Entry, Facts};
use super::failure;
use super::session::{self, Attempted, Fate};
use crate::agent::fail_point;
use longhaul_api::{ApiError, Asked, ErrorCode, Outcome, Phase, Side};
use longhaul_engine::handover::{self, Record};
use longhaul_hypervisor::guest::{self, Found, Guest};
use longhaul_hypervisor::memory;
use longhaul_protocol::message::ToDestination;
use longhaul_protocol::{Attempt, Epoch, Generation, MigrationId};
use longhaul_storage::{Holder, Journal, JournalError, Right, RightsError};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Between two tries to reach the other host of a guest in doubt.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long the destination of an aborted attempt is looked for, to be told.
const TELL_WITHIN: Duration = Duration::from_secs(60);
/// An epoch above all that the lost agent may have used.
const EPOCH_AFTER: Epoch = Epoch(1 << 24);

/// What keeps an agent from taking up an earlier one's work.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecoveryError {
    /// A journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A right cannot be used.
    #[error(transparent)]
    Rights(#[from] RightsError),
    /// The guests cannot be found.
    #[error("cannot look for guests: {0}")]
    Guests(#[from] std::io::Error),
}

/// One attempt as its journal tells it.
struct Left {
    migration: MigrationId,
    attempt: Attempt,
    side: handover::Side,
    guest: String,
    generation: Generation,
    peer_name: String,
    paused: bool,
    journal: Journal,
}

/// Brings every attempt to an end, or to somebody who waits for one.
pub(super) async fn take_up(context: &Arc<Context>) -> Result<(), RecoveryError> {
    for migration in Journal::list(&context.journals)? {
        let journal = Journal::open(&context.journals, migration)?;
        let last = journal.records().last().cloned();
        let Some(left) = Left::of(migration, journal) else {
            continue;
        };
        match (left.side, last) {
            (handover::Side::Source, Some(Record::Began { .. })) => {
                stay(context, left).await?;
            }
            (handover::Side::Source, Some(Record::Released { generation, .. })) => {
                wait_for_word(context, left, generation)?;
            }
            (handover::Side::Source, Some(Record::Done { .. })) => clear(context, &left).await?,
            (handover::Side::Destination, Some(Record::Began { .. } | Record::Ready { .. })) => {
                give_up(context, left).await?
            }
            (handover::Side::Destination, Some(Record::Committed { generation, .. })) => {
                run(context, left, generation).await?;
            }
            (handover::Side::Destination, Some(Record::Returned { .. })) => {
                give_back(context, &left)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The destination gave the guest back; what it noted before may say otherwise.
fn give_back(context: &Context, left: &Left) -> Result<(), RecoveryError> {
    let taken = left.right(Generation(left.generation.0 + 1), Holder::Here);
    if context.rights.get(&left.guest)?.as_ref() == Some(&taken) {
        let host = left.peer_name.clone();
        let back = left.right(left.generation, Holder::Elsewhere { host });
        context.rights.give_back(&taken, &back)?;
    }
    Ok(())
}

impl Left {
    fn of(migration: MigrationId, journal: Journal) -> Option<Self> {
        let began = journal
            .records()
            .iter()
            .rev()
            .find_map(|record| match record {
                Record::Began {
                    attempt,
                    side,
                    guest,
                    generation,
                    peer_name,
                    paused,
                    ..
                } => Some((
                    *attempt,
                    *side,
                    guest.clone(),
                    *generation,
                    peer_name.clone(),
                    *paused,
                )),
                _ => None,
            });
        let (attempt, side, guest, generation, peer_name, paused) = began?;
        Some(Self {
            migration,
            attempt,
            side,
            guest,
            generation,
            peer_name,
            paused,
            journal,
        })
    }

    fn find(&self, context: &Context) -> Result<Option<Found>, RecoveryError> {
        let found = guest::find_all(&context.parts.config.state)?;
        let named = |found: &Found| match found {
            Found::Running(guest) | Found::Ended(guest) => guest.name() == self.guest,
            Found::Damaged { .. } => false,
        };
        Ok(found.into_iter().find(named))
    }

    fn right(&self, generation: Generation, holder: Holder) -> Right {
        Right {
            guest: self.guest.clone(),
            generation,
            holder,
        }
    }

    fn entry(&self, context: &Context, phase: Phase) -> Arc<Entry> {
        let here = context.parts.config.name.clone();
        let (side, source, destination) = match self.side {
            handover::Side::Source => (Side::Source, here, self.peer_name.clone()),
            handover::Side::Destination => (Side::Destination, self.peer_name.clone(), here),
        };
        let asked = Asked {
            downtime_ms: 0,
            bandwidth_bps: None,
            verify: false,
            patience_ms: 0,
        };
        let guest = self.guest.clone();
        let facts = Facts {
            id: self.migration,
            guest,
            side,
            source,
            destination,
            asked,
        };
        let entry = Arc::new(Entry::new(facts));
        entry.enter(phase);
        context.registry.add(entry.clone());
        entry
    }
}

/// The source never released the guest: it goes on here.
async fn stay(context: &Arc<Context>, mut left: Left) -> Result<(), RecoveryError> {
    let entry = left.entry(context, Phase::Preparing);
    let mut state = format!("{} runs on {}", left.guest, context.parts.config.name);
    if let Some(Found::Running(guest)) = left.find(context)? {
        match resume(&guest, !left.paused).await {
            Ok(()) => tracing::info!(guest = left.guest, "goes on here"),
            Err(error) => {
                tracing::error!(guest = left.guest, error, "cannot be brought back");
                state = format!("{} could not be resumed: {error}", left.guest);
            }
        }
    } else {
        state = format!(
            "{} does not run on {}",
            left.guest, context.parts.config.name
        );
    }
    let reason = "the source's agent was restarted".to_owned();
    let record = Record::Aborted {
        attempt: left.attempt,
        reason: reason.clone(),
    };
    fail_point::append(&mut left.journal, &record)?;
    let error = ApiError::new(ErrorCode::Internal, reason).state_of_guest(state);
    entry.end(Outcome::Failed, Some(error));
    context.archive.keep(&entry);
    let context = context.clone();
    tokio::spawn(async move {
        let told = timeout(TELL_WITHIN, tell(&context, &left)).await;
        tracing::debug!(migration = %left.migration, told = told.is_ok(), "the destination");
    });
    Ok(())
}

async fn resume(guest: &Guest, run: bool) -> Result<(), String> {
    let qmp = guest.connect().await.map_err(|error| error.to_string())?;
    memory::resume(&qmp, run)
        .await
        .map_err(|error| error.to_string())
}

/// Tells the destination of an aborted attempt that nobody will come back.
async fn tell(context: &Arc<Context>, left: &Left) {
    let attempted = left.attempted();
    match session::resume(context.clone(), attempted, EPOCH_AFTER, None).await {
        Ok((mut session, _)) => {
            let cancel = ToDestination::Cancel {
                reason: "the source's agent was restarted".into(),
            };
            if let Err(error) = session.sender.send(&cancel).await {
                tracing::debug!(%error, "the destination was not told");
            } else {
                // Its answer, or the end of the channel.
                let answer = session.receiver.recv_within(Duration::from_secs(10)).await;
                tracing::debug!(?answer, "the destination was told");
            }
        }
        Err(error) => tracing::debug!(%error, "the destination knows already, or never will"),
    }
}

impl Left {
    fn attempted(&self) -> Attempted {
        Attempted {
            migration: self.migration,
            attempt: self.attempt,
            host: self.peer_name.clone(),
        }
    }
}

/// The source has released the guest: only the destination knows more.
fn wait_for_word(
    context: &Arc<Context>,
    mut left: Left,
    generation: Generation,
) -> Result<(), RecoveryError> {
    let host = left.peer_name.clone();
    let in_doubt = left.right(generation, Holder::InDoubt { host: host.clone() });
    match context.rights.set(&in_doubt) {
        // The guest has changed hands since: its later journals say more.
        Err(RightsError::Older { .. }) => return Ok(()),
        other => other?,
    }
    let entry = left.entry(context, Phase::HandingOver);
    entry.end(
        Outcome::InDoubt,
        Some(failure::not_here(
            &left.guest,
            &super::Holder::InDoubt(host),
        )),
    );
    let context = context.clone();
    tokio::spawn(async move {
        loop {
            let settled = match session::ask(&context, &left.attempted()).await {
                Ok(Fate::Open) => Ok(false),
                Ok(Fate::Committed) => settle_committed(&context, &mut left, generation).await,
                Ok(Fate::Aborted(reason)) => {
                    settle_aborted(&context, &mut left, &entry, reason).await
                }
                Err(error) => {
                    tracing::debug!(guest = left.guest, %error, "in doubt");
                    Ok(false)
                }
            };
            match settled {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => tracing::error!(guest = left.guest, %error, "in doubt"),
            }
            sleep(ASK_EVERY).await;
        }
        if entry.outcome() == Some(Outcome::InDoubt) {
            entry.end(Outcome::Completed, None);
        }
        context.archive.keep(&entry);
    });
    Ok(())
}

async fn settle_committed(
    context: &Arc<Context>,
    left: &mut Left,
    generation: Generation,
) -> Result<bool, RecoveryError> {
    let record = Record::Done {
        attempt: left.attempt,
    };
    fail_point::append(&mut left.journal, &record)?;
    let host = left.peer_name.clone();
    context
        .rights
        .set(&left.right(generation, Holder::Elsewhere { host }))?;
    clear(context, left).await?;
    Ok(true)
}

async fn settle_aborted(
    context: &Arc<Context>,
    left: &mut Left,
    entry: &Entry,
    reason: String,
) -> Result<bool, RecoveryError> {
    let record = Record::Aborted {
        attempt: left.attempt,
        reason: reason.clone(),
    };
    fail_point::append(&mut left.journal, &record)?;
    let host = left.peer_name.clone();
    let next = Generation(left.generation.0 + 1);
    context.rights.give_back(
        &left.right(next, Holder::InDoubt { host }),
        &left.right(left.generation, Holder::Here),
    )?;
    let mut state = format!("{} runs on {}", left.guest, context.parts.config.name);
    if let Some(Found::Running(guest)) = left.find(context)?
        && let Err(error) = resume(&guest, !left.paused).await
    {
        state = format!("{} could not be resumed: {error}", left.guest);
    }
    let error = failure::peer_gave_up(&left.peer_name, &reason).state_of_guest(state);
    entry.end(Outcome::Failed, Some(error));
    Ok(true)
}

/// The guest is elsewhere: its QEMU here is ended, if it still is there.
async fn clear(context: &Arc<Context>, left: &Left) -> Result<(), RecoveryError> {
    let right = context.rights.get(&left.guest)?;
    let moved_since = right.is_some_and(|right| right.holder == Holder::Here);
    if moved_since {
        return Ok(());
    }
    remove(context, left).await
}

/// Ends the guest's QEMU and removes everything that was made for it.
async fn remove(context: &Context, left: &Left) -> Result<(), RecoveryError> {
    for found in guest::find_all(&context.parts.config.state)? {
        match found {
            Found::Running(guest) | Found::Ended(guest) if guest.name() == left.guest => {
                if let Err(error) = guest.stop(None).await {
                    tracing::error!(guest = left.guest, %error, "something of it is left over");
                }
            }
            // The agent was ended while it removed the folder, which it does last of all.
            Found::Damaged { folder, why } if folder.name() == left.guest => {
                tracing::info!(
                    guest = left.guest,
                    why,
                    "removing what is left of its folder"
                );
                std::fs::remove_dir_all(folder.path())?;
            }
            Found::Running(_) | Found::Ended(_) | Found::Damaged { .. } => {}
        }
    }
    Ok(())
}

/// The destination has not committed: the attempt is over.
async fn give_up(context: &Arc<Context>, mut left: Left) -> Result<(), RecoveryError> {
    let entry = left.entry(context, Phase::Preparing);
    remove(context, &left).await?;
    let reason = "the destination's agent was restarted".to_owned();
    let record = Record::Aborted {
        attempt: left.attempt,
        reason: reason.clone(),
    };
    fail_point::append(&mut left.journal, &record)?;
    let state = format!("{} stays at {}", left.guest, left.peer_name);
    entry.end(
        Outcome::Failed,
        Some(ApiError::new(ErrorCode::Internal, reason).state_of_guest(state)),
    );
    context.archive.keep(&entry);
    Ok(())
}

/// The guest belongs here: it is told to run, unless it does, or has been since.
async fn run(
    context: &Arc<Context>,
    left: Left,
    generation: Generation,
) -> Result<(), RecoveryError> {
    let newer = context
        .rights
        .get(&left.guest)?
        .is_some_and(|r| r.generation > generation);
    if newer {
        return Ok(());
    }
    context.rights.set(&left.right(generation, Holder::Here))?;
    let Some(Found::Running(mut guest)) = left.find(context)? else {
        return Ok(());
    };
    if guest.record().generation == generation.0 {
        // It was told to run, and has been its owner's since.
        return Ok(());
    }
    if !left.paused
        && let Err(error) = resume(&guest, true).await
    {
        tracing::error!(guest = left.guest, error, "committed, and does not run");
        return Ok(());
    }
    guest.set_generation(generation.0)?;
    Ok(())
}
