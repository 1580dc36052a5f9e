//! The source's connection to the destination for one attempt, which is made again when it is lost.

use crate::channel::{self, Receiver, Sender, TalkError};
use crate::context::Context;
use crate::handover::ledger::Ledger;
use crate::source::sender::Line;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_attempt::source::DialError;
use longhaul_hypervisor::manager::Cookie;
use longhaul_protocol::message::{AttemptState, Keeps, Offer, Refusal, ToDestination, ToSource};
use longhaul_protocol::{AttemptId, Epoch, HostId, Incarnation};
use longhaul_transport::{BulkBinding, BulkConfig, BulkToken, ConnectError, Control, LinkError};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Time limit for the destination to answer an offer, before which it runs hooks, and to accept it,
/// before which it launches a QEMU.
pub(crate) const OFFER_WITHIN: Duration = Duration::from_secs(120);
/// The time limit for a destination whose guest another program manages to prepare it.
const PREPARED_WITHIN: Duration = Duration::from_secs(180);
/// The time limit for the reason why a destination takes no connection for blocks.
const REASON_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for any other answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);

/// An open connection: control, the migration's channel, and bulk.
pub(crate) struct Session {
    pub(crate) control: Control,
    pub(crate) sender: Sender<ToDestination>,
    pub(crate) receiver: Receiver<ToSource>,
    /// The bulk connection; `None` if the destination needs no blocks.
    pub(crate) line: Option<Arc<Line>>,
}

/// The reason why a session could not be established.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    /// No connection could be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection was made, and then lost.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The channel ended, or a message broke the protocol.
    #[error(transparent)]
    Talk(#[from] TalkError),
    /// The destination refuses the guest.
    #[error("{}", .0.text)]
    Refused(Refusal),
    /// The destination has given up the attempt.
    #[error("the destination gave up: {0}")]
    Aborted(String),
    /// The destination runs the guest.
    #[error("the destination has committed")]
    Committed {
        /// Whether it needs no more blocks from the source.
        all_present: bool,
    },
    /// The missing blocks of the guest's disks cannot be sent.
    #[error("the missing blocks of its disks cannot be sent: {0}")]
    Left(#[from] std::io::Error),
    /// The host that answers has lost the journals that the attempt was offered to.
    #[error(
        "its journals are not those that this migration was offered to (lost, replaced or \
         restored), \
         so it cannot tell whether the guest runs there"
    )]
    OtherJournals,
    /// The answer does not fit the question.
    #[error("the destination breaks the protocol: {0}")]
    Protocol(&'static str),
}

/// What a source needs to connect to the destination of an attempt again.
#[derive(Debug, Clone)]
pub(crate) struct Attempted {
    id: AttemptId,
    pub(crate) host: String,
    /// The host that the attempt was offered to, independent of its current name.
    peer: Option<HostId>,
    /// The incarnation of the journals that the attempt was offered to. `None` accepts others too.
    incarnation: Option<Incarnation>,
}

impl Attempted {
    /// Creates it from the ledger. With `any_journals`, journals of another incarnation may answer
    /// too.
    pub(crate) fn of(ledger: &Ledger, any_journals: bool) -> Self {
        Self {
            id: ledger.attempt_id(),
            host: ledger.host.clone(),
            peer: ledger.peer,
            incarnation: ledger.incarnation().filter(|_| !any_journals),
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

/// Makes an offer with this message. Returns the session, and what the destination has of the guest
/// already. The destination takes blocks from now on, and accepts the offer later.
pub(crate) async fn offer(
    control: Control,
    message: ToDestination,
    offer: &Offer,
    (bandwidth_bps, more_time): (Option<u64>, Duration),
) -> Result<(Session, Keeps), SessionError> {
    let (mut sender, mut receiver) = channel::as_source(control.open().await?);
    sender.send(&message)?;
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
        attempt: offer.attempt_id(),
        epoch: Epoch(1),
    };
    let line = match bulk(&control, &token, binding, bandwidth_bps).await {
        Ok(line) => line,
        // A destination that cannot launch the guest takes no such connection, and says why here.
        Err(error) => {
            return Err(match receiver.recv_within(REASON_WITHIN).await {
                Ok(ToSource::Refused(refusal)) => SessionError::Refused(refusal),
                Ok(_) | Err(_) => error,
            });
        }
    };
    let session = Session {
        control,
        sender,
        receiver,
        line: Some(line),
    };
    Ok((session, keeps))
}

/// Waits until the program that manages an offered guest has prepared the destination.
pub(crate) async fn prepared(session: &mut Session) -> Result<Cookie, SessionError> {
    match session.receiver.recv_within(PREPARED_WITHIN).await? {
        ToSource::Prepared { cookie } => Ok(Cookie(cookie)),
        ToSource::Refused(refusal) => Err(SessionError::Refused(refusal)),
        _ => Err(SessionError::Protocol(
            "Launching of a managed guest is followed by Prepared or Refused",
        )),
    }
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

/// A connection that was made again, and the state of the attempt at the destination if it has
/// reported it.
pub(crate) type Dialled = Result<(Session, Option<AttemptState>), SessionError>;

/// A task that connects again, which is aborted when this is dropped. Without the abort, a source
/// could resume an attempt that is over, and the destination would record it again.
pub(crate) struct Dial(JoinHandle<Dialled>);

impl Dial {
    /// Begins to connect: for blocks, with this epoch, or to ask about the attempt without one.
    pub(crate) fn begin(
        context: &Arc<Context>,
        attempted: Attempted,
        epoch: Option<Epoch>,
        bandwidth_bps: Option<u64>,
    ) -> Self {
        let context = context.clone();
        Self(tokio::spawn(async move {
            match epoch {
                Some(epoch) => {
                    let resumed = try_resume(&context, &attempted, epoch, bandwidth_bps).await?;
                    Ok((resumed.0, Some(resumed.1)))
                }
                None => Ok((ask(&context, &attempted).await?, None)),
            }
        }))
    }

    /// Waits for the result.
    async fn done(&mut self) -> Dialled {
        let interrupted = SessionError::Protocol("connecting again was interrupted");
        (&mut self.0).await.unwrap_or(Err(interrupted))
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Waits for the result of connecting, if that has begun, and forgets the task.
pub(crate) async fn dialled(dial: &mut Option<Dial>) -> Dialled {
    let done = match dial {
        Some(dial) => dial.done().await,
        None => std::future::pending().await,
    };
    *dial = None;
    done
}

/// Waits for the next message. Without a connection it waits forever.
pub(crate) async fn next_message(session: &mut Option<Session>) -> Result<ToSource, TalkError> {
    match session {
        Some(session) => session.receiver.recv().await,
        None => std::future::pending().await,
    }
}

impl SessionError {
    /// Returns whether another attempt to connect fails in the same way until an operator changes
    /// something.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Connect(error) if is_final(error))
    }

    /// Returns the error as the core of the attempt knows it.
    pub(crate) fn to_core(&self) -> DialError {
        match self {
            Self::Aborted(reason) => DialError::Aborted(reason.clone()),
            Self::Committed { all_present } => DialError::Committed {
                all_present: *all_present,
            },
            Self::OtherJournals => DialError::OtherJournals,
            Self::Left(_) => DialError::Local,
            Self::Connect(error) if !is_final(error) => DialError::Unreachable,
            Self::Link(_) | Self::Talk(TalkError::Channel(_) | TalkError::Silent(_)) => {
                DialError::Unreachable
            }
            Self::Connect(_) | Self::Talk(_) | Self::Refused(_) | Self::Protocol(_) => {
                DialError::Refused(self.to_string())
            }
        }
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

async fn try_resume(
    context: &Context,
    attempted: &Attempted,
    epoch: Epoch,
    bandwidth_bps: Option<u64>,
) -> Result<(Session, AttemptState), SessionError> {
    let control = attempted.connect(context).await?;
    let (mut sender, mut receiver) = channel::as_source(control.open().await?);
    let AttemptId { migration, attempt } = attempted.id;
    sender.send(&ToDestination::Resume {
        migration,
        attempt,
        epoch,
    })?;
    let (token, state) = match receiver.recv_within(ANSWER_WITHIN).await? {
        ToSource::Resumed { bulk_token, state } => (bulk_token, state),
        ToSource::Aborted { reason, .. } => return Err(SessionError::Aborted(reason)),
        ToSource::Committed { .. } => {
            return Err(SessionError::Committed { all_present: false });
        }
        ToSource::AllPresent { .. } => {
            return Err(SessionError::Committed { all_present: true });
        }
        // The destination's agent was restarted when it had all blocks, so it needs no more.
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
        attempt: attempted.id,
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

/// Asks for the outcome of an attempt. The answers follow on the channel.
async fn ask(context: &Context, attempted: &Attempted) -> Result<Session, SessionError> {
    let control = attempted.connect(context).await?;
    let (mut sender, receiver) = channel::as_source(control.open().await?);
    let AttemptId { migration, attempt } = attempted.id;
    sender.send(&ToDestination::Ask { migration, attempt })?;
    Ok(Session {
        control,
        sender,
        receiver,
        line: None,
    })
}

/// Returns the API's error for a failed session.
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
