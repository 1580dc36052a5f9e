//! Serves the streams of the API: a watched migration, and the events of this host, as lines of
//! JSON.

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use longhaul_api::{Progress, WATCH_REPEAT_MS};
use longhaul_migration::Events;
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

/// The interval at which a stream repeats that nothing has changed.
const REPEAT: Duration = Duration::from_millis(WATCH_REPEAT_MS);
/// The minimum interval between two lines of a watched migration.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

struct Watched {
    progress: watch::Receiver<Progress>,
    /// The earliest time of the next line.
    not_before: Instant,
    first: bool,
    ended: bool,
}

/// Returns the progress of a migration, until it has an outcome.
pub(crate) fn watch(progress: watch::Receiver<Progress>) -> Response {
    let watched = Watched {
        progress,
        not_before: Instant::now(),
        first: true,
        ended: false,
    };
    response(stream::unfold(watched, |mut watched| async move {
        let line = watched.next().await?;
        Some((line, watched))
    }))
}

/// Returns the events of this host, until the agent stops. A client that does not read does not
/// make this read ahead: it falls behind, and then gets the present state again.
pub(crate) fn events(events: Events) -> Response {
    response(stream::unfold(events, |mut events| async move {
        let line = match timeout(REPEAT, events.next()).await {
            Ok(event) => line(&*event?)?,
            Err(_) => line(&events.current())?,
        };
        Some((line, events))
    }))
}

fn response(lines: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let kind = HeaderValue::from_static("application/x-ndjson");
    let body = Body::from_stream(lines.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

/// Returns a line of JSON, or `None`, which ends the stream, if it cannot be written.
fn line(content: &impl Serialize) -> Option<Bytes> {
    match serde_json::to_vec(content) {
        Ok(mut line) => {
            line.push(b'\n');
            Some(Bytes::from(line))
        }
        Err(error) => {
            tracing::error!(%error, "a line could not be written as JSON");
            None
        }
    }
}

impl Watched {
    async fn next(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        if !self.first {
            sleep_until(self.not_before).await;
            let repeat_at = self.not_before - WATCH_PAUSE + REPEAT;
            if let Ok(Err(_)) = timeout_at(repeat_at, self.progress.changed()).await {
                // The agent stops: the last progress may still have the outcome.
                self.ended = true;
            }
        }
        self.first = false;
        self.not_before = Instant::now() + WATCH_PAUSE;
        let progress = self.progress.borrow_and_update().clone();
        self.ended |= progress.outcome.is_some();
        line(&progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_watch_ends_with_the_outcome_or_with_the_agent() {
        let progress = |elapsed_ms, outcome| Progress {
            id: "00".to_owned(),
            elapsed_ms,
            phase: longhaul_api::Phase::Precopy,
            pass: None,
            regions: Vec::new(),
            link: longhaul_api::LinkProgress {
                rate_bps: None,
                rtt_ms: None,
                sent_bytes: 0,
                guest_bytes: None,
                limit_bps: None,
                interrupted_ms: None,
                paths: Vec::new(),
            },
            dirty_rate_bytes_per_s: None,
            predicted_downtime_ms: None,
            outpaced: None,
            awaits_bases: false,
            trouble: None,
            remaining_ms: None,
            outcome,
            reason: None,
        };
        let read = async |end: fn(watch::Sender<Progress>, Progress)| {
            let (sender, receiver) = watch::channel(progress(1, None));
            let body = super::watch(receiver).into_body();
            let last = progress(2, Some(longhaul_api::Outcome::Completed));
            end(sender, last);
            let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
            let lines = bytes
                .split(|byte| *byte == b'\n')
                .filter(|line| !line.is_empty());
            let times = lines.map(|line| {
                let progress: Progress = serde_json::from_slice(line).unwrap();
                progress.elapsed_ms
            });
            times.collect::<Vec<_>>()
        };
        let completed = read(|sender, last| {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                sender.send_replace(last);
                tokio::time::sleep(Duration::from_secs(60)).await;
            });
        });
        assert_eq!(completed.await, [1, 2]);
        let gone = read(|sender, _| drop(sender)).await;
        assert_eq!(gone, [1, 1], "without an outcome");
    }
}
