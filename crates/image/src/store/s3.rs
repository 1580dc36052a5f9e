//! A store in a bucket, or under a prefix in one, of an S3-compatible service.

use super::http::{Connector, SetupError};
use super::{Key, Listing, Store, StoreError};
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, RetryConfig};
use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Limits on the time of one request, and on its retries. Callers that want to wait longer repeat
/// the request.
const RETRY_TIMEOUT: Duration = Duration::from_secs(20);
const RETRIES: usize = 3;
/// Threads for connections, which also decrypt.
const THREADS: usize = 2;
/// A service's error code for a missing bucket.
const NO_BUCKET: &str = "NoSuchBucket";

/// The place in a service: `s3://BUCKET`, or `s3://BUCKET/PREFIX`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Place {
    bucket: String,
    prefix: String,
}

impl fmt::Display for S3Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}", self.bucket)?;
        match &self.prefix[..] {
            "" => Ok(()),
            prefix => write!(f, "/{prefix}"),
        }
    }
}

impl FromStr for S3Place {
    type Err = S3SetupError;

    fn from_str(text: &str) -> Result<Self, S3SetupError> {
        let rest = text.strip_prefix("s3://").ok_or(S3SetupError::Place)?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_name = |name: &str| !name.is_empty() && name.chars().all(fits);
        if !is_name(bucket) || (!prefix.is_empty() && !prefix.split('/').all(is_name)) {
            return Err(S3SetupError::Place);
        }
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
        })
    }
}

/// A reason why a bucket is unusable.
#[derive(Debug, thiserror::Error)]
pub enum S3SetupError {
    /// The place is malformed.
    #[error(
        "a bucket is given as s3://BUCKET or s3://BUCKET/PREFIX, of letters, digits, `-`, `_`, `.`"
    )]
    Place,
    /// The settings are inconsistent.
    #[error("the settings for {place} cannot be used: {error}")]
    Settings {
        /// The bucket.
        place: S3Place,
        /// The fault.
        error: Error,
    },
    /// Connections cannot be made.
    #[error("cannot connect to S3: {0}")]
    Connections(#[from] SetupError),
    /// The system refused.
    #[error("cannot start threads for S3: {0}")]
    Threads(#[from] std::io::Error),
}

/// A store in a bucket, or under a prefix in one.
pub struct S3Store {
    place: S3Place,
    client: Arc<AmazonS3>,
    /// Set until the store is dropped.
    runtime: Option<Runtime>,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the client, which knows secrets.
        write!(f, "S3Store({})", self.place)
    }
}

impl S3Store {
    /// Returns the store in a bucket with the settings in the environment, as S3 tools use them:
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`,
    /// `AWS_ALLOW_HTTP` and others.
    pub fn new(place: S3Place) -> Result<Self, S3SetupError> {
        Self::with(place, AmazonS3Builder::from_env())
    }

    /// Returns the store in a bucket of a given service and account.
    pub fn at(
        place: S3Place,
        endpoint: &str,
        access_key: &str,
        secret_key: &str,
    ) -> Result<Self, S3SetupError> {
        let builder = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(endpoint.starts_with("http://"))
            .with_access_key_id(access_key)
            .with_secret_access_key(secret_key);
        Self::with(place, builder)
    }

    fn with(place: S3Place, builder: AmazonS3Builder) -> Result<Self, S3SetupError> {
        let retry = RetryConfig {
            max_retries: RETRIES,
            retry_timeout: RETRY_TIMEOUT,
            ..RetryConfig::default()
        };
        let client = builder
            .with_bucket_name(&place.bucket)
            .with_retry(retry)
            .with_http_connector(Connector::new()?)
            .build();
        let client = client.map_err(|error| S3SetupError::Settings {
            place: place.clone(),
            error,
        })?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("s3")
            .enable_all()
            .build()?;
        Ok(Self {
            place,
            client: Arc::new(client),
            runtime: Some(runtime),
        })
    }

    /// Runs a future on the store's own threads, and waits for it on any thread.
    fn wait<T, F>(
        &self,
        what: impl FnOnce() -> String,
        work: impl FnOnce(Arc<AmazonS3>) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
        T: Send + 'static,
    {
        let (sender, receiver) = mpsc::channel();
        let future = work(self.client.clone());
        if let Some(runtime) = &self.runtime {
            runtime.spawn(async move {
                // The receiver waits until it is sent.
                let _ = sender.send(future.await);
            });
        }
        match receiver.recv() {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(error)) => Err(self.error(what(), &error)),
            Err(_) => Err(StoreError::Away {
                store: self.place(),
                reason: "a thread ended unexpectedly".to_owned(),
            }),
        }
    }

    fn error(&self, what: String, error: &Error) -> StoreError {
        let store = self.place();
        let reason = in_one_line(error);
        match error {
            Error::NotFound { .. } if reason.contains(NO_BUCKET) => StoreError::Away {
                store,
                reason: "there is no such bucket".to_owned(),
            },
            Error::NotFound { .. } => StoreError::Missing { what, store },
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => StoreError::Refused {
                what: format!("get or change {what}"),
                store,
                reason,
            },
            _ => StoreError::Away { store, reason },
        }
    }

    fn path(&self, folder: &str, name: &str) -> Path {
        let parts = [&self.place.prefix[..], folder, name];
        // Empty parts are omitted.
        Path::from_iter(parts.iter().flat_map(|part| part.split('/')))
    }

    fn key(&self, key: &Key) -> Path {
        let (folder, name) = key.place();
        self.path(&folder, &name)
    }
}

/// Returns the service's or the connection's error, without the request, which is described
/// elsewhere.
fn in_one_line(error: &Error) -> String {
    let text = error.to_string();
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    let between = |begin: &str, end: &str| {
        let (_, rest) = text.split_once(begin)?;
        Some(rest.split_once(end)?.0)
    };
    let said = match (
        between("<Code>", "</Code>"),
        between("<Message>", "</Message>"),
    ) {
        (Some(code), Some(message)) => format!("{message} ({code})"),
        (Some(code), None) => code.to_owned(),
        _ => match text.split_once("Error performing ") {
            Some((_, tried)) => tried
                .split_once(" - ")
                .map_or(tried, |(_, said)| said)
                .to_owned(),
            None => text,
        },
    };
    said.chars().take(300).collect()
}

impl Drop for S3Store {
    fn drop(&mut self) {
        // The thread that drops the store may not be allowed to block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Store for S3Store {
    fn place(&self) -> String {
        self.place.to_string()
    }

    fn get(&self, key: &Key, length_max: u64) -> Result<Vec<u8>, StoreError> {
        let path = self.key(key);
        let got = self.wait(
            || key.words(),
            |client| async move {
                let object = client.get(&path).await?;
                if object.meta.size > length_max {
                    return Ok(None);
                }
                Ok(Some(object.bytes().await?.to_vec()))
            },
        )?;
        got.ok_or_else(|| StoreError::TooLong {
            what: key.words(),
            store: self.place(),
        })
    }

    fn has(&self, key: &Key) -> Result<bool, StoreError> {
        let path = self.key(key);
        let words = || key.words();
        match self.wait(words, |client| async move { client.head(&path).await }) {
            Ok(_) => Ok(true),
            Err(StoreError::Missing { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn put(&self, key: &Key, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.key(key);
        let payload = bytes.to_vec().into();
        let words = || key.words();
        self.wait(
            words,
            |client| async move { client.put(&path, payload).await },
        )?;
        Ok(())
    }

    fn settle(&self) -> Result<(), StoreError> {
        // A service answers once an object is durable.
        Ok(())
    }

    fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let path = self.key(key);
        let words = || key.words();
        match self.wait(words, |client| async move { client.delete(&path).await }) {
            Ok(()) | Err(StoreError::Missing { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn list(&self, listing: Listing) -> Result<Vec<String>, StoreError> {
        let path = self.path(&listing.folder(), "");
        let what = || format!("the list of {}", listing.folder());
        let objects = self.wait(what, |client| async move {
            let objects = client.list(Some(&path));
            let names = objects.map_ok(|object| object.location.filename().map(str::to_owned));
            names.try_collect::<Vec<_>>().await
        })?;
        Ok(objects.into_iter().flatten().collect())
    }

    fn tidy(&self) -> Result<(), StoreError> {
        // An incomplete put leaves no object.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        for good in ["s3://images", "s3://images/longhaul/a"] {
            assert_eq!(good.parse::<S3Place>().unwrap().to_string(), good);
        }
        let place: S3Place = "s3://images/a/".parse().unwrap();
        assert_eq!(place.to_string(), "s3://images/a");
        for bad in ["images", "s3://", "s3:///a", "s3://a/b c", "s3://a//b"] {
            bad.parse::<S3Place>().unwrap_err();
        }
    }

    #[test]
    fn keys_are_below_the_prefix() {
        let place = "s3://images/a/b".parse().unwrap();
        let store = S3Store::at(place, "http://127.0.0.1:1", "key", "secret").unwrap();
        assert_eq!(store.key(&Key::Format).as_ref(), "a/b/longhaul-images");
        let marker = Key::Marker("import-1".to_owned());
        assert_eq!(store.key(&marker).as_ref(), "a/b/markers/import-1");
        assert!(!format!("{store:?}").contains("secret"));
    }
}
