//! The source's connection to the destination for one attempt, made and made again.

use crate::channel::{self, Receiver, Sender, TalkError};
use crate::context::Context;
use crate::handover::ledger::Ledger;
use crate::source::sender::Line;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_engine::handover::SourceState;
use longhaul_protocol::message::{AttemptState, Keeps, Offer, Refusal, ToDestination, ToSource};
use longhaul_protocol::{Attempt, Epoch, HostId, Incarnation, MigrationId};
use longhaul_transport::{BulkBinding, BulkConfig, BulkToken, ConnectError, Control, LinkError};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The destination runs hooks before it answers an offer, and launches a QEMU before it accepts it.
pub(crate) const OFFER_WITHIN: Duration = Duration::from_secs(120);
/// Any other answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// Between two tries to connect again.
const REDIAL_PAUSE: Duration = Duration::from_millis(250);

/// An open connection: control, the migration's channel, and bulk.
pub(crate) struct Session {
    pub(crate) control: Control,
    pub(crate) sender: Sender<ToDestination>,
    pub(crate) receiver: Receiver<ToSource>,
    /// Bulk; none where the destination has everything already.
    pub(crate) line: Option<Arc<Line>>,
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// It was there, and is gone.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The channel ended, or broke the protocol.
    #[error(transparent)]
    Talk(#[from] TalkError),
    /// The destination does not take the guest.
    #[error("{}", .0.text)]
    Refused(Refusal),
    /// The attempt is over there.
    #[error("the destination gave up: {0}")]
    Aborted(String),
    /// The destination has the guest.
    #[error("the destination has committed")]
    Committed {
        /// And needs nothing of the source any more.
        all_present: bool,
    },
    /// What is left of the guest's disks cannot be sent.
    #[error("what is left of its disks cannot be sent: {0}")]
    Left(#[from] std::io::Error),
    /// The host that answers has lost the journals that the attempt was offered to.
    #[error(
        "its journals are not those that this migration was offered to (lost, replaced or \
         restored), \
         so it cannot tell whether the guest runs there"
    )]
    OtherJournals,
    /// An answer that does not fit.
    #[error("the destination breaks the protocol: {0}")]
    Protocol(&'static str),
}

/// What a source needs to come back.
#[derive(Debug, Clone)]
pub(crate) struct Attempted {
    pub(crate) migration: MigrationId,
    pub(crate) attempt: Attempt,
    pub(crate) host: String,
    /// The host that the attempt was offered to, whatever its name is now.
    peer: Option<HostId>,
    /// The journals that it was offered to; none if others may answer too.
    incarnation: Option<Incarnation>,
}

impl Attempted {
    /// What a source in this state needs. Once the guest is known to stay here, the answer of other
    /// journals is as good.
    pub(crate) fn of(ledger: &Ledger, state: &SourceState) -> Self {
        Self {
            migration: ledger.migration,
            attempt: ledger.terms.attempt,
            host: ledger.host.clone(),
            peer: ledger.peer,
            incarnation: ledger.incarnation().filter(|_| !state.keeps_guest()),
        }
    }

    async fn connect(&self, context: &Context) -> Result<Control, SessionError> {
        let control = match self.peer {
            Some(id) => context.endpoint.connect_id(id, &self.host).await?,
            None => context.endpoint.connect(&self.host).await?,
        };
        match self.incarnation {
            Some(known) if control.peer().incarnation != Some(known) => {
                Err(SessionError::OtherJournals)
            }
            _ => Ok(control),
        }
    }
}

/// Makes an offer, in this message. The destination has yet to accept it, and takes blocks already;
/// it says what it has of the guest already.
pub(crate) async fn offer(
    control: Control,
    message: ToDestination,
    offer: &Offer,
    (bandwidth_bps, more_time): (Option<u64>, Duration),
) -> Result<(Session, Keeps), SessionError> {
    let (mut sender, mut receiver) = channel::as_source(control.open().await?);
    sender.send(&message).await?;
    let (token, keeps) = match receiver.recv_within(OFFER_WITHIN + more_time).await? {
        ToSource::Launching { bulk_token, keeps } => (bulk_token, keeps),
        ToSource::Refused(refusal) => return Err(SessionError::Refused(refusal)),
        _ => {
            return Err(SessionError::Protocol(
                "an offer is answered by Launching or Refused",
            ));
        }
    };
    let binding = BulkBinding {
        migration: offer.migration,
        attempt: offer.attempt,
        epoch: Epoch(1),
    };
    let line = bulk(&control, &token, binding, bandwidth_bps).await?;
    let session = Session {
        control,
        sender,
        receiver,
        line: Some(line),
    };
    Ok((session, keeps))
}

async fn bulk(
    control: &Control,
    token: &[u8],
    binding: BulkBinding,
    bandwidth_bps: Option<u64>,
) -> Result<Arc<Line>, SessionError> {
    let token: [u8; 32] = token
        .try_into()
        .map_err(|_| SessionError::Protocol("a token has 32 bytes"))?;
    let token = BulkToken::from_bytes(token);
    let config = BulkConfig {
        bandwidth_bps,
        ..BulkConfig::default()
    };
    let bulk = control.connect_bulk(&token, binding, config).await?;
    Ok(Line::new(bulk, binding.epoch))
}

/// Connects again beside whatever else is done, for as long as this is there: who came back to an
/// attempt that is over would have the destination record it anew.
pub(crate) struct Redial(JoinHandle<Result<(Session, AttemptState), SessionError>>);

impl Redial {
    /// Begins to, after a while.
    pub(crate) fn begin(
        context: &Arc<Context>,
        attempted: Attempted,
        last: Epoch,
        (after, bandwidth_bps): (Duration, Option<u64>),
    ) -> Self {
        let context = context.clone();
        Self(tokio::spawn(async move {
            sleep(after).await;
            resume(context, attempted, last, bandwidth_bps).await
        }))
    }

    /// Waits until it is connected, or never will be.
    pub(crate) async fn done(&mut self) -> Result<(Session, AttemptState), SessionError> {
        let interrupted = SessionError::Protocol("connecting again was interrupted");
        (&mut self.0).await.unwrap_or(Err(interrupted))
    }
}

impl Drop for Redial {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Connects again until it succeeds or the destination says that there is nothing to come back to.
/// Whoever waits for this sets the limit.
async fn resume(
    context: Arc<Context>,
    attempted: Attempted,
    last: Epoch,
    bandwidth_bps: Option<u64>,
) -> Result<(Session, AttemptState), SessionError> {
    let mut epoch = last;
    loop {
        // The destination may have taken an epoch into use of which this side never heard.
        epoch = Epoch(epoch.0 + 1);
        match try_resume(&context, &attempted, epoch, bandwidth_bps).await {
            Err(SessionError::Connect(error)) if !is_final(&error) => {
                context.not_back(attempted.migration, &error);
            }
            Err(SessionError::Link(error)) => context.not_back(attempted.migration, &error),
            Err(SessionError::Talk(TalkError::Channel(error))) => {
                context.not_back(attempted.migration, &error);
            }
            Err(SessionError::Talk(TalkError::Silent(_))) => {}
            other => return other,
        }
        sleep(REDIAL_PAUSE).await;
    }
}

impl Context {
    /// The destination could not be asked.
    fn not_back(&self, migration: MigrationId, error: &dyn std::fmt::Display) {
        tracing::debug!(%migration, %error, "not back yet");
        if let Ok(entry) = self.registry.get(migration) {
            entry.silent(&error.to_string());
        }
    }
}

impl SessionError {
    /// Whether another try would end in the same way, until somebody changes something.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Connect(error) if is_final(error))
    }
}

fn is_final(error: &ConnectError) -> bool {
    matches!(
        error,
        ConnectError::NotTrusted(_)
            | ConnectError::Trust(_)
            | ConnectError::IdentityChanged { .. }
            | ConnectError::Incompatible(_)
    )
}

pub(crate) async fn try_resume(
    context: &Context,
    attempted: &Attempted,
    epoch: Epoch,
    bandwidth_bps: Option<u64>,
) -> Result<(Session, AttemptState), SessionError> {
    let control = attempted.connect(context).await?;
    let (mut sender, mut receiver) = channel::as_source(control.open().await?);
    let Attempted {
        migration, attempt, ..
    } = *attempted;
    sender
        .send(&ToDestination::Resume {
            migration,
            attempt,
            epoch,
        })
        .await?;
    let (token, state) = match receiver.recv_within(ANSWER_WITHIN).await? {
        ToSource::Resumed { bulk_token, state } => (bulk_token, state),
        ToSource::Aborted { reason, .. } => return Err(SessionError::Aborted(reason)),
        ToSource::Committed { .. } => {
            return Err(SessionError::Committed { all_present: false });
        }
        ToSource::AllPresent { .. } => {
            return Err(SessionError::Committed { all_present: true });
        }
        // Its agent was restarted when everything was there: no block is needed any more.
        ToSource::Ready { .. } => {
            let session = Session {
                control,
                sender,
                receiver,
                line: None,
            };
            return Ok((session, AttemptState::Ready));
        }
        ToSource::Status { .. } => return Err(TalkError::Silent(ANSWER_WITHIN).into()),
        _ => return Err(SessionError::Protocol("Resume is answered by Resumed")),
    };
    let binding = BulkBinding {
        migration,
        attempt,
        epoch,
    };
    let line = bulk(&control, &token, binding, bandwidth_bps).await?;
    Ok((
        Session {
            control,
            sender,
            receiver,
            line: Some(line),
        },
        state,
    ))
}

/// A channel about an attempt, without the bulk connection that blocks would need.
pub(crate) struct Conversation {
    pub(crate) sender: Sender<ToDestination>,
    pub(crate) receiver: Receiver<ToSource>,
}

/// Asks what became of an attempt; the answers follow on the channel.
pub(crate) async fn ask(
    context: &Context,
    attempted: &Attempted,
) -> Result<Conversation, SessionError> {
    let control = attempted.connect(context).await?;
    let (mut sender, receiver) = channel::as_source(control.open().await?);
    let Attempted {
        migration, attempt, ..
    } = *attempted;
    sender
        .send(&ToDestination::Ask { migration, attempt })
        .await?;
    Ok(Conversation { sender, receiver })
}

/// A failed session, as it is answered.
pub(crate) fn failure(host: &str, error: &SessionError) -> ApiError {
    match error {
        SessionError::Connect(error) => crate::status::failure::connect(host, error),
        SessionError::Refused(refusal) => crate::status::failure::refused(refusal.clone()),
        SessionError::Protocol(what) => crate::status::failure::protocol(host, what),
        SessionError::Aborted(reason) => crate::status::failure::peer_gave_up(host, reason),
        SessionError::Left(error) => crate::status::failure::internal(&error.to_string()),
        SessionError::Link(_)
        | SessionError::Talk(_)
        | SessionError::OtherJournals
        | SessionError::Committed { .. } => {
            ApiError::new(ErrorCode::PeerUnreachable, format!("{host}: {error}"))
        }
    }
}
