//! The stream of messages about a device of a parcel, over an upgraded connection: each message
//! after its length in 4 bytes, little-endian.

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};

/// The name of the protocol in the headers.
pub const DEVICE_PROTOCOL: &str = "longhaul-parcel-device";
/// The maximum size of a message, in bytes: a cell of a parcel, and what a message has besides.
pub const DEVICE_MESSAGE_BYTES_MAX: usize = (1 << 20) + 64;

/// A stream of messages.
pub struct DeviceStream {
    /// What reads messages.
    pub reader: DeviceReader,
    /// What writes messages.
    pub writer: DeviceWriter,
}

/// What reads messages.
pub struct DeviceReader(Box<dyn AsyncRead + Send + Unpin>);

/// What writes messages.
pub struct DeviceWriter(Box<dyn AsyncWrite + Send + Unpin>);

impl DeviceStream {
    /// Begins the messages of an upgraded connection.
    pub fn of(stream: TokioIo<Upgraded>) -> Self {
        Self::over(stream)
    }

    fn over<S: AsyncRead + AsyncWrite + Send + 'static>(stream: S) -> Self {
        let (reader, writer): (ReadHalf<S>, WriteHalf<S>) = split(stream);
        Self {
            reader: DeviceReader(Box::new(reader)),
            writer: DeviceWriter(Box::new(writer)),
        }
    }
}

impl DeviceReader {
    /// Reads the next message. Returns `None` at the end.
    pub async fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut prefix = [0; 4];
        let (first, rest) = prefix.split_at_mut(1);
        if self.0.read(first).await? == 0 {
            return Ok(None);
        }
        self.0.read_exact(rest).await?;
        let bytes = u32::from_le_bytes(prefix) as usize;
        if bytes > DEVICE_MESSAGE_BYTES_MAX {
            let what = format!("a message of {bytes} bytes is too long");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let mut message = vec![0; bytes];
        self.0.read_exact(&mut message).await?;
        Ok(Some(message))
    }
}

impl DeviceWriter {
    /// Writes a message.
    pub async fn write(&mut self, message: &[u8]) -> io::Result<()> {
        let bytes = message.len();
        let prefix = u32::try_from(bytes).ok();
        let prefix = prefix.filter(|_| bytes <= DEVICE_MESSAGE_BYTES_MAX);
        let prefix = prefix.ok_or_else(|| {
            let what = format!("a message of {bytes} bytes is too long");
            io::Error::new(io::ErrorKind::InvalidInput, what)
        })?;
        self.0.write_all(&prefix.to_le_bytes()).await?;
        self.0.write_all(message).await?;
        self.0.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_keep_their_bounds() {
        let (here, there) = tokio::io::duplex(1000);
        let (mut here, mut there) = (DeviceStream::over(here), DeviceStream::over(there));
        let long = vec![7; DEVICE_MESSAGE_BYTES_MAX];
        let written = async {
            here.writer.write(b"abc").await.unwrap();
            here.writer.write(b"").await.unwrap();
            here.writer.write(&long).await.unwrap();
            assert!(
                here.writer
                    .write(&[&long[..], b"x"].concat())
                    .await
                    .is_err()
            );
            drop(here);
        };
        let read = async {
            let reader = &mut there.reader;
            assert_eq!(reader.read().await.unwrap().as_deref(), Some(&b"abc"[..]));
            assert_eq!(reader.read().await.unwrap().as_deref(), Some(&b""[..]));
            assert_eq!(reader.read().await.unwrap().as_ref(), Some(&long));
            assert_eq!(reader.read().await.unwrap(), None);
        };
        tokio::join!(written, read);
    }

    #[tokio::test]
    async fn what_is_cut_or_too_long_is_an_error() {
        let (mut here, there) = tokio::io::duplex(1000);
        let mut there = DeviceStream::over(there);
        here.write_all(&[3, 0, 0, 0, b'a']).await.unwrap();
        drop(here);
        assert!(there.reader.read().await.is_err());
        let (mut here, there) = tokio::io::duplex(1000);
        let mut there = DeviceStream::over(there);
        here.write_all(&u32::MAX.to_le_bytes()).await.unwrap();
        assert!(there.reader.read().await.is_err());
    }
}
