//! Asks another host for the address under which it sees this one.

use super::{BindingAnswer, BindingError, BindingRequest, TransactionId};
use crate::endpoint::canonical;
use crate::quic::{Transmit, UdpSender};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// The time from each request to the next, or to the end (RFC 8489, section 6.2.1, with fewer
/// requests).
const WAITS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_millis(1000),
    Duration::from_millis(1000),
];

/// The addresses of this host's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reflexive {
    /// The address that the other host sees.
    pub address: SocketAddr,
    /// The address on this host that the other host's answer came to, if the system reports it.
    pub local: Option<SocketAddr>,
}

/// Why this host's address is not known.
#[derive(Debug, thiserror::Error)]
pub enum ReflexiveError {
    /// No answer came. Older agents give none.
    #[error("no answer to STUN requests")]
    NoAnswer,
    /// The other host answered with an error.
    #[error("the STUN request was refused with error {0}")]
    Refused(u16),
    /// The request could not be sent.
    #[error("cannot send a STUN request: {0}")]
    Send(io::Error),
}

/// An answer to a question of [`Endpoint::ask`](crate::Endpoint::ask).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// The number of the question.
    pub id: u64,
    /// The source of the answer.
    pub from: SocketAddr,
    /// This host's address in the answer.
    pub mapped: SocketAddr,
}

/// The maximum number of questions that wait for answers. The oldest one is given up for another.
const QUESTIONS_MAX: usize = 128;

/// The requests that wait for answers.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The one that a task waits for.
    asked: Mutex<Option<Asked>>,
    questions: Mutex<Questions>,
}

#[derive(Debug, Default)]
struct Questions {
    waiting: VecDeque<Question>,
    answers: Option<mpsc::Sender<Observation>>,
}

#[derive(Debug)]
struct Question {
    id: u64,
    transaction: TransactionId,
    server: SocketAddr,
}

#[derive(Debug)]
struct Asked {
    transaction: TransactionId,
    server: SocketAddr,
    answer: oneshot::Sender<(Result<SocketAddr, BindingError>, Option<IpAddr>)>,
}

impl Pending {
    /// Passes on an answer that came from `from` to this host's address `to`; returns whether it
    /// was waited for.
    pub(crate) fn answered(&self, datagram: &[u8], from: SocketAddr, to: Option<IpAddr>) -> bool {
        let Ok(answer) = BindingAnswer::decode(datagram) else {
            return false;
        };
        let is_answer = |asked: &mut Asked| {
            asked.transaction == answer.transaction && asked.server == canonical(from)
        };
        match self.lock().take_if(is_answer) {
            // Fails only when nobody waits any more.
            Some(asked) => asked.answer.send((answer.result, to)).is_ok(),
            None => self.observed(&answer, canonical(from)),
        }
    }

    /// Passes on an answer to a numbered question.
    fn observed(&self, answer: &BindingAnswer, from: SocketAddr) -> bool {
        let mut questions = self.questions();
        let place = questions.waiting.iter().position(|question| {
            question.transaction == answer.transaction && question.server == from
        });
        let question = place.and_then(|place| questions.waiting.remove(place));
        let (Some(question), Some(answers)) = (question, &questions.answers) else {
            return false;
        };
        let Ok(mapped) = answer.result else {
            return false;
        };
        let observation = Observation {
            id: question.id,
            from,
            mapped: canonical(mapped),
        };
        answers.try_send(observation).is_ok()
    }

    /// Returns where answers to numbered questions arrive from now on.
    pub(crate) fn answers(&self) -> mpsc::Receiver<Observation> {
        let (sender, receiver) = mpsc::channel(QUESTIONS_MAX);
        self.questions().answers = Some(sender);
        receiver
    }

    /// Returns the request of a new numbered question.
    pub(crate) fn question(&self, id: u64, server: SocketAddr) -> io::Result<Vec<u8>> {
        let request = new_request()?;
        let mut questions = self.questions();
        if questions.waiting.len() >= QUESTIONS_MAX {
            questions.waiting.pop_front();
        }
        questions.waiting.push_back(Question {
            id,
            transaction: request.transaction,
            server: canonical(server),
        });
        Ok(request.encode())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Asked>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn questions(&self) -> MutexGuard<'_, Questions> {
        let questions = self.questions.lock();
        questions.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a request with a transaction that nobody can guess.
fn new_request() -> io::Result<BindingRequest> {
    let mut transaction = TransactionId::default();
    getrandom::fill(&mut transaction).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(BindingRequest {
        transaction,
        fingerprint: true,
        unknown: Vec::new(),
    })
}

/// Asks on the endpoint's socket, one question at a time.
#[derive(Debug)]
pub(crate) struct Client {
    sender: tokio::sync::Mutex<Pin<Box<dyn UdpSender>>>,
    pending: Arc<Pending>,
}

impl Client {
    pub(crate) fn new(sender: Pin<Box<dyn UdpSender>>, pending: Arc<Pending>) -> Self {
        let sender = tokio::sync::Mutex::new(sender);
        Self { sender, pending }
    }

    /// Asks the host at `server` for this host's address. `socket` is the socket's own address.
    pub(crate) async fn ask(
        &self,
        server: SocketAddr,
        socket: SocketAddr,
    ) -> Result<Reflexive, ReflexiveError> {
        let mut sender = self.sender.lock().await;
        let request = new_request().map_err(ReflexiveError::Send)?;
        let transaction = request.transaction;
        let request = request.encode();
        let (answer, mut answered) = oneshot::channel();
        *self.pending.lock() = Some(Asked {
            transaction,
            server: canonical(server),
            answer,
        });
        for wait in WAITS {
            let transmit = Transmit {
                destination: server,
                ecn: None,
                contents: &request,
                segment_size: None,
                src_ip: None,
            };
            let sent = poll_fn(|context| sender.as_mut().poll_send(&transmit, context)).await;
            sent.map_err(ReflexiveError::Send)?;
            if let Ok(answered) = tokio::time::timeout(wait, &mut answered).await {
                let (result, to) = answered.map_err(|_| ReflexiveError::NoAnswer)?;
                let address = result.map_err(|error| ReflexiveError::Refused(error.code))?;
                let ip = to.or_else(|| Some(socket.ip()).filter(|ip| !ip.is_unspecified()));
                let local = ip.map(|ip| canonical(SocketAddr::new(ip, socket.port())));
                return Ok(Reflexive { address, local });
            }
        }
        Err(ReflexiveError::NoAnswer)
    }
}
